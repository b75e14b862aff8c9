"""`Controller.step` on simulated ranks. Under Horovod: parallel/bodies/lockstep.py and controller_alone.py."""

import copy
import json
import random

import pytest
import torch
from simulated import RecordingWorld, Worker, on_ranks

from hvd_dyncomp import (
    Controller,
    ControllerError,
    Decision,
    DynamicQuantizer,
    LockstepError,
    Policy,
    Schedule,
    StepFunction,
)
from hvd_dyncomp.transport.in_process import Deadlock, InProcessTransport, World

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
        "ControllerError: rank 1 called Controller.step with ValueError",
        "LockstepError: Controller.step: rank 0 has metrics ['a'], rank 1 has metrics ['b']",
        "LockstepError: Controller.step: rank 0 has epoch 0, rank 1 has epoch 7",
        "ControllerError: rank 1 called Controller.step with ValueError: num_samples",
        "ControllerError: the policy failed on rank 0 after epoch 0: KeyError",
        "LockstepError: after Controller.step rank 0 has bits 2, rank 1 has 8",
    ]
    assert [text[: len(wanted)] for text, wanted in zip(first, expected, strict=True)] == expected


@AROUND
@pytest.mark.parametrize(("ranks", "alone"), [(2, 0), (2, 1), (3, 1)])
def test_a_rank_alone_in_it_and_those_that_train_hear_of_each_other(ranks, alone, choices):
    def program(worker: Worker) -> str:
        worker.step(worker.noise(0))
        with pytest.raises(LockstepError) as caught:
            if worker.transport.rank == alone:
                worker.controller.step({"accuracy": 0.5})
            worker.step(worker.noise(1))
        return str(caught.value)

    other = 1 if alone == 0 else 0
    texts, _ = on_ranks(ranks, program, SIZES, 4, choices=choices)
    for text in texts:
        assert f"rank {alone} is in Controller.step, and rank {other} goes on training" in text


def shaken(world: RecordingWorld) -> list[list[str]]:
    """The optimizers for which ranks held out their hands in calls of `Controller.step`."""
    return [json.loads(tensor.numpy().tobytes()) for tensor in world.messages("controller.waited")]


def test_a_rank_that_comes_late_does_no_harm():
    """It may come so late that the others look around."""

    def program(worker: Worker):
        for epoch in range(3):
            worker.step(worker.noise(epoch))
            worker.controller.step({"accuracy": 0.5})
        worker.step(worker.noise(3))
        return torch.cat([p.detach() for p in worker.parameters.values()])

    expected, _ = on_ranks(3, program, SIZES, Schedule({0: 4, 2: 2}))
    late = []
    for choices in CHOICES:
        seen, world = on_ranks(3, program, SIZES, Schedule({0: 4, 2: 2}), choices=choices)
        assert all(torch.equal(one, expected[0]) for one in seen)
        late += shaken(world)
    assert len([labels for labels in late if labels]) > 10 and [] in late


@AROUND
def test_ranks_that_have_ended_are_not_waited_for(choices):
    def program(worker: Worker) -> None:
        worker.step(worker.noise(0))
        if worker.transport.rank != 1:
            worker.controller.step({})

    with pytest.raises(Deadlock, match="rank 0 for hvd_dyncomp.controller.metrics"):
        on_ranks(3, program, SIZES, 4, choices=choices)


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
