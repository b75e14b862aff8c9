"""Replicas that have parted are an error on every rank; equal ones, and what is not compared, cost nothing more."""

import copy
import re
import struct

import pytest
import torch
from simulated import SimulatedOptimizer, Worker, on_ranks, parameters

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError
from hvd_dyncomp.replicas import _number
from hvd_dyncomp.simulate import InProcessTransport, World

pytestmark = [
    pytest.mark.promise("If replicas differ, an error on every rank names the parameter."),
    pytest.mark.timeout(60),
]

SIZES = {"a": 130, "b": 500, "c": 5}
RANKS = 3


def bits_of(pattern: int) -> float:
    """A float32 of these bits."""
    return struct.unpack("f", struct.pack("I", pattern))[0]


def changed(program, bits: float = 4, **arguments) -> list[str]:
    """What every rank hears at the end of an epoch in which the last one does something to its worker."""

    def run(worker: Worker) -> str:
        worker.step(worker.noise(0))
        if worker.transport.rank == RANKS - 1:
            program(worker)
        return next_epoch(worker)

    said, _ = on_ranks(RANKS, run, SIZES, bits, **arguments)
    return said


def next_epoch(worker: Worker) -> str:
    """The error in the first step of the next epoch, or ""."""
    worker.controller.step({})
    return stepped(worker)


def stepped(worker: Worker) -> str:
    """The error in a step, or ""."""
    try:
        worker.step(worker.noise(9))
    except LockstepError as error:
        return str(error)
    return ""


def another(worker: Worker, named: dict[str, torch.nn.Parameter]) -> Worker:
    """The same rank's, of another optimizer with the same controller."""
    other = copy.copy(worker)
    other.parameters = named
    other.quantizer = DynamicQuantizer(worker.controller, transport=worker.transport, block_size=64, min_numel=10)
    other.optimizer = SimulatedOptimizer(named, other.quantizer, worker.transport)
    return other


@pytest.mark.parametrize("value", [1.0, -0.0, float("nan")])
def test_one_value_that_differs_is_named_on_every_rank(value):
    def program(worker: Worker) -> None:
        worker.parameters["b"].data[7] = value

    def zero(worker: Worker) -> str:
        worker.step(worker.noise(0))
        for p in worker.parameters.values():
            p.data.zero_()
        if worker.transport.rank == RANKS - 1:
            program(worker)
        return next_epoch(worker)

    said, _ = on_ranks(RANKS, zero, SIZES, 4)
    assert len(set(said)) == 1
    assert said[0].startswith("parameter b is not the same on rank 0 and rank 2; 1 of 3 parameters differ.")
    assert "no_sync" in said[0] and "check_replicas=False" in said[0]


@pytest.mark.parametrize("bits", [0.25, 4, 32])
def test_replicas_that_are_equal_cost_no_collective_more(bits):
    """And parameters are read once in an epoch, never before a run's first step."""

    def run(worker: Worker) -> int:
        read = []
        source = worker.quantizer._source or worker.quantizer.attach(worker.optimizer) or worker.quantizer._source
        trained = source.trained
        source.trained = lambda: read.append(1) or trained()
        for epoch in range(3):
            for step in range(3):
                worker.step(worker.noise(10 * epoch + step))
                assert len(read) == epoch
            worker.controller.step({})
        assert len(read) == 2
        worker.quantizer.check_replicas()

    _, world = on_ranks(RANKS, run, SIZES, bits)
    assert len(world.messages("handshake")) == 9 * RANKS and not world.messages("introduction")
    assert len(world.messages("quantizer.replicas")) == RANKS


def test_nans_of_other_bits_are_other_values():
    def run(worker: Worker) -> str:
        worker.step(worker.noise(0))
        worker.parameters["a"].data[3] = bits_of(0x7FC00000 + worker.transport.rank)
        return next_epoch(worker)

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    assert len(set(said)) == 1 and said[0].startswith("parameter a is not the same on rank 0 and rank 1; 1 of 3")


@pytest.mark.parametrize("bits", [0.25, 1, 4, 16, 32])
@pytest.mark.parametrize("some", [{0}, {RANKS - 1}, set(range(RANKS))], ids=["first", "last", "all"])
def test_gradients_with_nans_of_other_bits_part_no_replicas(bits, some):
    """Every rank decodes, and adds, the same in one order."""

    def run(worker: Worker) -> None:
        for step in range(2):
            gradients = worker.noise(step)
            if worker.transport.rank in some:
                for each in gradients.values():
                    each[::3] = bits_of(0x7FC00000 + (worker.transport.rank << 16) + (worker.transport.rank % 2 << 31))
            for name, mean in worker.step(gradients).items():
                worker.parameters[name].data -= 0.1 * mean
                assert mean.isnan().any(), name
        assert next_epoch(worker) == ""

    on_ranks(RANKS, run, SIZES, bits)


def test_what_only_some_ranks_train_is_not_compared():
    """A quantizer that has no optimizer yet; an optimizer of two ranks; a controller without a quantizer."""

    def run(worker: Worker) -> None:
        transport, controller = worker.transport, worker.controller
        alive = [DynamicQuantizer(controller, transport=transport)]
        if transport.rank:
            alive.append(another(worker, parameters(SIZES)))
        worker.step(worker.noise(0))
        assert next_epoch(worker) == ""
        assert Controller(8, transport=transport).step({}) == 8
        assert len(alive) == (2 if transport.rank else 1)

    on_ranks(RANKS, run, SIZES, 4)


@pytest.mark.parametrize("wrong", ["first", "second", "shared"])
def test_two_optimizers_of_one_controller_are_both_compared(wrong):
    """Each in its own steps. One of them has some of the other's parameters, too."""

    def run(worker: Worker) -> list[str]:
        own = torch.nn.Parameter(torch.zeros(40))
        second = another(worker, {"d": own, "b": worker.parameters["b"]})
        for each in (worker, second):
            each.step({name: torch.ones_like(p.data) for name, p in each.parameters.items()})
        if worker.transport.rank == 0:
            {"first": worker.parameters["c"], "second": own, "shared": worker.parameters["b"]}[wrong].data += 1
        worker.controller.step({})
        said = []
        for each in (worker, second):
            try:
                each.step({name: torch.ones_like(p.data) for name, p in each.parameters.items()})
            except LockstepError as error:
                said.append(str(error))
            else:
                said.append("")
        return said

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    words = {"first": ("c", ""), "second": ("", "d"), "shared": ("b", "b")}[wrong]
    for found in said:
        for name, text in zip(words, found, strict=True):
            assert text.startswith(f"parameter {name} is not the same on rank 0 and rank 1") if name else text == ""


def test_ranks_that_have_just_begun_are_not_compared():
    """A run's first step: that of ranks that join, too, whose values come otherwise."""

    def run(worker: Worker) -> str:
        worker.parameters["c"].data += worker.transport.rank
        assert stepped(worker) == "", "the first one"
        if worker.transport.rank == 1:
            worker.quantizer._epoch = None  # a new one
        if worker.transport.rank != 1:
            worker.parameters["c"].data.zero_()
        return next_epoch(worker)

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    assert said == [""] * RANKS


def test_the_controller_may_step_between_backward_and_step():
    """On some ranks only: their step in flight has begun, and the next one compares."""

    def run(worker: Worker) -> str:
        worker.step(worker.noise(0))
        worker.backward(worker.noise(1))
        if worker.transport.rank == 1:
            worker.optimizer.synchronize()
        worker.controller.step({})
        if worker.transport.rank != 1:
            worker.optimizer.synchronize()
        assert stepped(worker) == ""
        worker.parameters["b"].data[0] = worker.transport.rank
        return next_epoch(worker)

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    assert all(text.startswith("parameter b is not the same on rank 0 and rank 1; 1 of 3") for text in said)


def test_after_replicas_have_parted_no_step_begins():
    def program(worker: Worker) -> None:
        worker.step(worker.noise(0))
        worker.parameters["c"].data += worker.transport.rank
        assert next_epoch(worker).startswith("parameter c is not the same")
        with pytest.raises(RuntimeError, match="was interrupted by LockstepError: parameter c is not the same"):
            worker.step(worker.noise(1))

    on_ranks(RANKS, program, SIZES, 4)


def test_a_group_that_is_added_later_is_trained_on_each_rank_alone():
    def program(worker: Worker) -> None:
        worker.step(worker.noise(0))
        added = torch.nn.Parameter(torch.ones(3))
        worker.optimizer.add_param_group({"params": [added]})
        added.grad = torch.full((3,), float(worker.transport.rank))
        worker.step(worker.noise(1))
        assert next_epoch(worker).startswith("parameter 0 of group 1 is not the same on rank 0 and rank 1; 1 of 4")

    def backward_without_zero_grad(self: Worker, gradients: dict[str, torch.Tensor]) -> None:
        for name, gradient in gradients.items():
            self.optimizer.backward(self.parameters[name], gradient)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "backward", backward_without_zero_grad)
        on_ranks(RANKS, program, SIZES, 4)


def test_a_parameter_that_one_rank_lacks():
    def program(worker: Worker) -> None:
        worker.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})

    [said, *others] = changed(program)
    assert others == [said] * 2
    assert "0 of group 1 is not the same on rank 0 and rank 2 (rank 0 has no such parameter); 1 of 4" in said


def test_the_check_is_off_on_all_ranks_or_an_error():
    def run(off: set[int]):
        def program(transport: InProcessTransport) -> str:
            worker = Worker(transport, SIZES, 4)
            worker.controller.check_replicas = transport.rank not in off
            worker.step(worker.noise(0))
            worker.parameters["a"].data += transport.rank
            try:
                return next_epoch(worker)
            except LockstepError as error:
                assert worker.controller.epoch == 0, "the epoch does not count"
                return f"step: {error}"

        return World(RANKS).run(program)

    assert run({0, 1, 2}) == [""] * RANKS
    assert run({1}) == ["step: after Controller.step rank 0 has check_replicas True, rank 1 has False"] * RANKS


def test_a_rank_that_cannot_read_its_parameters_tells_all():
    def run(worker: Worker) -> tuple[str, str]:
        worker.step(worker.noise(0))
        if worker.transport.rank == RANKS - 1:
            worker.quantizer._plan.source.trained = lambda: 1 / 0
        with pytest.raises((LockstepError, ZeroDivisionError)) as caught:
            worker.quantizer.check_replicas()
        worker.controller.step({})
        with pytest.raises((LockstepError, ZeroDivisionError)) as in_a_step:
            worker.step(worker.noise(1))
        return str(caught.value), str(in_a_step.value)

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    others = "rank 2 cannot compare its parameters: ZeroDivisionError: ", "rank 2 cannot use its quantizer: "
    assert said == [tuple(f"{words}division by zero" for words in others)] * 2 + [("division by zero",) * 2]


def test_on_request_and_before_a_step():
    def run(worker: Worker) -> list[str]:
        said = []
        for step in range(2):
            if step or worker.transport.rank:
                worker.quantizer._bind(worker.optimizer)
            worker.parameters["a"].data += step * worker.transport.rank
            with pytest.raises(RuntimeError) as caught:
                worker.quantizer.check_replicas()
            said.append(str(caught.value))
        return said

    [first, *others], _ = on_ranks(RANKS, run, SIZES, 4, attach=False)
    assert re.match("no optimizer is known yet; call it after a step", first[0])
    assert [said[0] for said in others] == [f"rank 0 cannot compare its parameters: RuntimeError: {first[0]}"] * 2
    assert {said[1] for said in others} == {first[1]}
    assert first[1].startswith("parameter a is not the same on rank 0 and rank 1; 1 of 3")


DTYPES = [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.int32, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_of_values_and_not_of_memory(dtype):
    values = (torch.arange(30) % 2).view(5, 6).to(dtype)
    number = _number(values)
    stored = torch.zeros(7, 13).to(dtype)
    stored.t()[1:7, 2:7].t().copy_(values)
    assert _number(stored.t()[1:7, 2:7].t()) == number
    assert _number(values[:0]) != _number(values[:, :0])
    for i in range(30):
        other = values.clone().reshape(-1)
        other[i] = 1 - (i % 2)
        assert _number(other.view(5, 6)) != number
    assert _number(values.view(6, 5)) != number


def test_numbers_of_unusual_tensors():
    values = torch.randn(4, 5)
    assert _number(values.to_sparse()) == _number(values.to_sparse_csr()) == _number(values)
    assert _number(torch.tensor(1.5)) != _number(torch.tensor(2.5))
    for without in (torch.nn.UninitializedParameter(), torch.empty(3, device="meta")):
        assert _number(without) == 0
