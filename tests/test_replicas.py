"""Replicas that have parted are an error on every rank; equal ones, and what is not compared, cost nothing more."""

import re
import struct

import pytest
import torch
from simulated import SimulatedOptimizer, Worker, on_ranks, parameters

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Schedule
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
        return ended(worker.controller)

    said, _ = on_ranks(RANKS, run, SIZES, bits, **arguments)
    return said


def ended(controller: Controller) -> str:
    """The error at the end of an epoch, or ""."""
    try:
        controller.step({})
    except LockstepError as error:
        return str(error)
    return ""


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
        return ended(worker.controller)

    said, _ = on_ranks(RANKS, zero, SIZES, 4)
    assert len(set(said)) == 1
    assert said[0].startswith("parameter b is not the same on rank 0 and rank 2; 1 of 3 parameters differ.")
    assert "no_sync" in said[0] and "check_replicas=False" in said[0]


@pytest.mark.parametrize("bits", [0.25, 4, 32])
def test_replicas_that_are_equal_cost_no_collective_more(bits):
    def run(worker: Worker) -> None:
        for epoch in range(3):
            for step in range(3):
                worker.step(worker.noise(10 * epoch + step))
            worker.controller.step({})
        worker.quantizer.check_replicas()

    _, world = on_ranks(RANKS, run, SIZES, bits)
    assert len(world.messages("controller.lockstep")) == 3 * RANKS
    assert not world.messages("controller.replicas") and world.messages("quantizer.replicas")


def test_nans_of_other_bits_are_other_values():
    def run(worker: Worker) -> str:
        worker.step(worker.noise(0))
        worker.parameters["a"].data[3] = bits_of(0x7FC00000 + worker.transport.rank)
        return ended(worker.controller)

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
        worker.controller.step({})

    on_ranks(RANKS, run, SIZES, bits)


def test_what_only_some_ranks_train_is_not_compared():
    """A quantizer that has no optimizer yet; an optimizer of two ranks; a controller without a quantizer."""

    def run(worker: Worker) -> None:
        transport, controller = worker.transport, worker.controller
        idle = DynamicQuantizer(controller, transport=transport)
        alive = [idle]
        if transport.rank:
            own = DynamicQuantizer(controller, transport=transport)
            optimizer = SimulatedOptimizer({f"own.{n}": p for n, p in parameters(SIZES).items()}, own, transport)
            own._bind(optimizer)
            alive += [own, optimizer]
        worker.step(worker.noise(0))
        assert controller.step({}) == 4
        assert Controller(8, transport=transport).step({}) == 8
        assert len(alive) == (3 if transport.rank else 1)

    on_ranks(RANKS, run, SIZES, 4)


def test_of_two_with_the_same_label_the_last_is_compared():
    """The first waits for the garbage collector on some ranks only, as after a fold of a cross validation."""

    def run(worker: Worker) -> list[str]:
        transport, controller, kept = worker.transport, worker.controller, worker.optimizer
        worker.step(worker.noise(0))
        if transport.rank == 1:
            kept = worker.optimizer = None
        following = DynamicQuantizer(controller, transport=transport, block_size=64, min_numel=10)
        named = parameters(SIZES)
        optimizer = SimulatedOptimizer(named, following, transport)
        following.attach(optimizer)
        said = [ended(controller)]
        if transport.rank == 0:
            named["c"].data += 1
        assert kept is worker.optimizer
        return [*said, ended(controller)]

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    for first, second in said:
        assert first == "" and second.startswith("parameter c is not the same on rank 0 and rank 1")


def test_two_models_with_the_same_label_are_both_compared():
    """As of two optimizers without `named_parameters`."""

    def run(worker: Worker) -> list[str]:
        transport, controller = worker.transport, worker.controller
        worker.step(worker.noise(0))
        second = DynamicQuantizer(controller, transport=transport, block_size=64, min_numel=10)
        optimizer = SimulatedOptimizer(parameters(SIZES), second, transport)
        second.attach(optimizer)
        said = [ended(controller)]
        if transport.rank == 0:
            worker.parameters["c"].data += 1
        said.append(ended(controller))
        assert optimizer is not worker.optimizer
        return said

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    for first, second in said:
        assert first == "" and second.startswith("parameter c is not the same on rank 0 and rank 1")


def test_two_models_that_share_some_parameters_are_both_compared():
    def run(worker: Worker) -> str:
        transport, controller = worker.transport, worker.controller
        worker.step(worker.noise(0))
        second = DynamicQuantizer(controller, transport=transport, block_size=64, min_numel=10)
        named = {"b": worker.parameters["b"], **parameters({"d": 40})}
        optimizer = SimulatedOptimizer(named, second, transport)
        second.attach(optimizer)
        if transport.rank == 0:
            worker.parameters["c"].data += 1
        said = ended(controller)
        assert optimizer is not worker.optimizer
        return said

    said, _ = on_ranks(RANKS, run, SIZES, 4)
    assert all(each.startswith("parameter c is not the same on rank 0 and rank 1") for each in said)


def test_an_epoch_that_ends_with_an_error_is_not_counted():
    """The same call again says the same."""

    def run(worker: Worker) -> None:
        worker.step(worker.noise(0))
        if worker.transport.rank == 0:
            worker.parameters["c"].data += 1
        for _ in range(2):
            assert ended(worker.controller).startswith("parameter c is not the same")
            assert (worker.controller.epoch, worker.controller.bits) == (0, 4)
        worker.parameters["c"].data.zero_()
        assert worker.controller.step({}, epoch=0) == 8
        if worker.transport.rank == 0:
            worker.parameters["c"].data += 1
        with pytest.raises(LockstepError, match="parameter c is not"):  # as a resumed run may call it again
            worker.controller.step({}, epoch=0)

    on_ranks(RANKS, run, SIZES, Schedule({0: 4, 1: 8}))


def test_a_group_that_is_added_later_is_trained_on_each_rank_alone():
    def program(worker: Worker) -> None:
        worker.step(worker.noise(0))
        added = torch.nn.Parameter(torch.ones(3))
        worker.optimizer.add_param_group({"params": [added]})
        added.grad = torch.full((3,), float(worker.transport.rank))
        worker.step(worker.noise(1))
        with pytest.raises(LockstepError, match="parameter 0 of group 1 is not the same on rank 0 and rank 1; 1 of 4"):
            worker.controller.step({})

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
            return ended(worker.controller)

        return World(RANKS).run(program)

    assert run({0, 1, 2}) == [""] * RANKS
    assert run({1}) == ["after Controller.step rank 0 has check_replicas True, rank 1 has False"] * RANKS


def test_a_rank_that_cannot_read_its_parameters_tells_all():
    def program(worker: Worker) -> None:
        worker.quantizer._plan.source.trained = lambda: 1 / 0

    said = changed(program)
    assert set(said) == {"rank 2 cannot compare its parameters: ZeroDivisionError: division by zero"}


def test_on_request_and_before_a_step():
    def run(worker: Worker) -> list[str]:
        said = []
        for step in range(2):
            if step or worker.transport.rank:
                worker.quantizer._bind(worker.optimizer)
            worker.parameters["a"].data += step * worker.transport.rank
            with pytest.raises(LockstepError) as caught:
                worker.quantizer.check_replicas()
            said.append(str(caught.value))
        return said

    [first, *others], _ = on_ranks(RANKS, run, SIZES, 4, attach=False)
    assert others == [first] * 2
    assert re.match("rank 0 cannot compare .* no optimizer is known yet; call it after a step", first[0])
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
