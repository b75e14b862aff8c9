"""`Controller.step` on simulated ranks. Under Horovod: on_horovod/on_ranks/test_lockstep.py and controller_alone.py."""

import copy
import random
import time

import pytest
from simulated import Worker, on_ranks

from hvd_dyncomp import (
    Controller,
    ControllerError,
    Decision,
    DynamicQuantizer,
    LockstepError,
    Policy,
    Schedule,
    Static,
    StepFunction,
)
from hvd_dyncomp.simulate import InProcessTransport, World

pytestmark = pytest.mark.timeout(60)

SIZES = {"a": 130, "b": 500}
# No choices at all, those that repeat soon, and some without an order.
CHOICES = [[], [0], [1], [0, 1], *([random.Random(seed).randrange(6) for _ in range(97)] for seed in range(12))]
AROUND = pytest.mark.parametrize("choices", CHOICES, ids=range(len(CHOICES)))


class Failing(Policy):
    """Well at first, then it fails, on whatever rank it is asked."""

    def decide(self, history):
        if history:
            raise KeyError("no such metric")
        return Decision(4, "start")

    def config(self):
        return {"policy": "Failing"}


@AROUND
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_decides_alike_from_the_weighted_mean(ranks, choices):
    def program(transport: InProcessTransport):
        controller = Controller(StepFunction(levels=(2, 4), thresholds=(0.5,)), transport=transport)
        last = transport.rank == ranks - 1  # alone, it would move the level at once
        for accuracy in (0.45, 0.55):
            metrics = {"val_accuracy": 1.0 if last else accuracy, "train_loss": 1.0}
            controller.step(metrics, num_samples=0 if last and ranks > 1 else 1 + transport.rank)
        return controller.state_dict()

    first, *others = World(ranks, choices).run(program)
    assert others == [first] * (ranks - 1)
    levels = [2, 4] if ranks > 1 else [4, 4]
    assert [record["bits"] for record in first["history"]] == levels


def raised(step, *arguments, **keywords) -> str:
    with pytest.raises((ControllerError, LockstepError)) as caught:
        step(*arguments, **keywords)
    return f"{caught.type.__name__}: {caught.value}"


@AROUND
def test_what_one_rank_does_wrong_is_an_error_on_all_and_leaves_nothing_behind(choices):
    def program(transport: InProcessTransport):
        controller = Controller(4, transport=transport)
        wrong = transport.rank == 1
        texts = [
            raised(controller.step, {"a": "high" if wrong else 1.0}),
            raised(controller.step, {"b" if wrong else "a": 1.0}),
            raised(controller.step, {"a": 1.0}, epoch=7 if wrong else None),
            raised(controller.step, {"a": 1.0}, num_samples=-1 if wrong else 1),
            raised(Controller(Failing(), transport=transport).step, {}),
            raised(Controller(8 if wrong else 2, transport=transport).step, {}),
        ]
        assert controller.history == [] and controller.step({"a": 1.0}) == 4
        return texts

    first, *others = World(3, choices).run(program)
    assert others == [first] * 2
    expected = [
        "ControllerError: Controller.step failed on rank 1: ValueError",
        "LockstepError: Controller.step: rank 0 has metrics ['a'], rank 1 has metrics ['b']",
        "LockstepError: Controller.step: rank 0 has epoch 0, rank 1 has epoch 7",
        "ControllerError: Controller.step failed on rank 1: ValueError: num_samples",
        "ControllerError: the policy failed on rank 0 after epoch 0: KeyError",
        "LockstepError: after Controller.step rank 0 has bits 2, rank 1 has 8",
    ]
    assert [text[: len(wanted)] for text, wanted in zip(first, expected, strict=True)] == expected


@pytest.mark.parametrize("loaded", [False, True])
def test_a_resumed_run_that_forgets_its_controller_is_warned_once(loaded, caplog):
    states: dict[int, tuple] = {}

    def first(worker: Worker) -> None:
        for epoch in range(3):
            worker.step(worker.noise(epoch))
            worker.controller.step({"val_accuracy": 0.5})
        worker.step(worker.noise(3))
        states[worker.transport.rank] = worker.quantizer.state_dict(), worker.controller.state_dict()

    def second(worker: Worker) -> None:
        quantizer, controller = states[worker.transport.rank]
        worker.quantizer.load_state_dict(quantizer)
        if loaded:
            worker.controller.load_state_dict(controller)
        for number in range(2):
            worker.step(worker.noise(number))

    on_ranks(2, first, SIZES, StepFunction())
    assert not warnings(caplog)
    on_ranks(2, second, SIZES, StepFunction())
    assert [("epoch 3" in said and "epoch 0" in said) for said in warnings(caplog)] == [True] * (not loaded)


def warnings(caplog) -> list[str]:
    return sorted(record.getMessage() for record in caplog.records if record.levelname == "WARNING")


ADVICE = (
    "every rank must call controller.step(...) after each epoch, and after as many backward passes as the others, with "
    "num_samples=0 if it does not validate; use 'if {} == 0:' only for code that prints or saves"
)


@pytest.mark.parametrize("training", [[], [1], [0, 1]])
def test_that_no_gradient_came_is_said_if_none_came_on_any_rank(training, caplog):
    def program(transport: InProcessTransport) -> None:
        controller = Controller(4, transport=transport)
        DynamicQuantizer(controller, transport=transport)
        if transport.rank in training:
            controller.exchanged = True
        controller.step({})

    World(2).run(program)
    assert ["exchanged gradients in epoch 0" in said for said in warnings(caplog)] == [True] * (not training)


def test_a_policy_may_write_into_what_it_gets():
    class Policy(Static):
        def decide(self, history):
            for record in history:
                record.metrics["seen"] = 1.0
            return super().decide(history)

    def program(transport: InProcessTransport) -> list:
        controller = Controller(Policy(4), transport=transport)
        for _ in range(3):
            controller.step({"a": 1.0})
        return [dict(record.metrics) for record in controller.history]

    assert World(2).run(program) == [[{"a": 1.0}] * 3] * 2


@pytest.mark.parametrize("rank_call", ["hvd.rank()", "torch.distributed.get_rank()"])
@pytest.mark.parametrize("late", [False, True])
def test_who_waits_in_it_for_long_says_so_once(late, rank_call, caplog, monkeypatch):
    """And not later, and in no other call."""
    monkeypatch.setattr("hvd_dyncomp.controller.LATE_SECONDS", 0.2)
    monkeypatch.setattr(InProcessTransport, "rank_call", rank_call)

    def program(transport: InProcessTransport) -> float:
        controller = Controller(4, transport=transport)
        if late and transport.rank == 1:
            time.sleep(0.5)
        level = controller.step({})
        if transport.rank == 1:
            time.sleep(0.5)
        controller.sync()
        return level

    assert World(2).run(program) == [4, 4]
    said = f"rank 0 has waited 0.2 s in Controller.step for other ranks: {ADVICE.format(rank_call)}"
    assert warnings(caplog) == [said] * late


def test_a_rank_whose_program_fails_is_what_is_raised():
    def program(worker: Worker) -> None:
        worker.step(worker.noise(0))
        if worker.transport.rank == 1:
            raise OSError("no data")
        worker.controller.step({})

    with pytest.raises(OSError, match="no data"):
        on_ranks(3, program, SIZES, 4)


def test_a_rank_that_joins_takes_over_what_rank_0_knows():
    def program(transport: InProcessTransport):
        controller = Controller(Schedule({0: 4, 1: 8, 2: 16}), transport=transport)
        if transport.rank == 0:
            state = {**controller.state_dict(), "bits": 8}
            state["history"] = [{"epoch": 0, "metrics": {"a": 1.0}, "bits": 8, "reason": "", "usable": True}]
            controller.load_state_dict(state)
        controller.sync()
        assert controller.bits == 8
        return controller.step({"a": 2.0}), controller.state_dict()

    first, *others = World(3).run(program)
    assert first[0] == 16 and others == [first] * 2


def test_one_that_a_quantizer_makes_works_among_the_quantizers_ranks():
    def program(transport: InProcessTransport):
        controller = DynamicQuantizer(4, transport=transport).controller
        controller.step({"a": float(transport.rank)})
        return controller.history[0].metrics

    assert World(2).run(program) == [{"a": 0.5}] * 2


def test_a_copy_works_among_the_same_ranks():
    def program(transport: InProcessTransport):
        controller = Controller(Schedule({0: 4, 1: 8, 2: 16}), transport=transport)
        controller.step({})
        twin = copy.deepcopy(controller)
        return twin.step({}), controller.bits, len(controller.history)

    assert World(2).run(program) == [(16, 8, 1)] * 2
