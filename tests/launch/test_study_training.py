"""The study's trainings: how they step."""

from dataclasses import replace

import pytest
import torch

from study.methods import METHODS
from study.tasks import Task, prepare
from study.trainer import leave_momentum_out, optimizer, put_momentum_back, train

pytestmark = pytest.mark.soak  # research: what it has found is on the pages


def tiny(**more) -> Task:
    return Task("tiny", **{"model": "mlp", "data": "digits", "limit": 256, "half_size": False, "epochs": 2, **more})


@pytest.mark.parametrize(
    "name",
    [
        *("uncompressed", "1/4, no momentum", "fp16", "1, Nesterov", "top-k 1/4"),
        *("PowerSGD rank 4, small at 8, no momentum", "PowerSGD rank 4, small at 8, from 10%"),
    ],
)
def test_a_run_learns_and_can_be_repeated(name: str, tmp_path) -> None:
    task = tiny(epochs=6)
    work = prepare(task, tmp_path)
    runs = [train(task, work, METHODS[name], seed=1) for _ in range(2)]
    assert [run.pop("seconds") >= 0 for run in runs] == [True, True]
    assert runs[0] == runs[1]
    assert len(runs[0]["curve"]) == 6
    assert runs[0]["score"] > 50, runs[0]["score"]
    assert runs[0]["bits"] < runs[0]["all_bits"] <= 32 or name in ("uncompressed", "fp16")


def test_momentum_is_left_out_where_a_method_says_so() -> None:
    """At the last of its levels; a level alone has the whole momentum."""

    def left(name: str) -> list[float | None]:
        return [METHODS[name].momentum_at(progress) for progress in (0.0, 0.9)]

    whole = ("1/4", "2", "4", "uncompressed", "1, Nesterov", "top-k 1/4", "4, first 10% at 8")
    assert [left(name) for name in whole] == [[None, None]] * len(whole)
    assert left("1/4, no momentum") == left("uncompressed, no momentum") == [0.0, 0.0]
    assert left("2, momentum 0.7") == [0.7, 0.7] and left("1, momentum 0.3") == [0.3, 0.3]
    later = ("1/4, no momentum, first 10% at 8", "PowerSGD rank 1, small at 8, from 10%, no momentum")
    assert [left(name) for name in later] == [[None, 0.0]] * 2


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_left_out_an_optimizer_with_momentum_trains_as_one_without(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("study.trainer.SMALL", 0)  # small tensors keep theirs
    task = tiny(weight_decay=0.01, optimizer=kind, rate=0.01)
    without = replace(task, momentum=0.0, rate=0.1 if kind == "sgd" else 0.01)
    names = {"uncompressed, no momentum": task, "uncompressed": without}
    left_out, plain = (train(own, prepare(own, tmp_path), METHODS[name], 0) for name, own in names.items())
    kept = train(task, prepare(task, tmp_path), METHODS["uncompressed"], 0)
    assert left_out["loss"] == pytest.approx(plain["loss"], rel=1e-3)
    assert kept["loss"] != pytest.approx(plain["loss"], rel=1e-3)


def test_momentum_that_comes_back_starts_anew() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    task = tiny(weight_decay=0.0, rate=1.0)
    stepper = optimizer(task, [weight])
    steps = []
    for left_out in (False, False, True, False, False):
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        stepper.param_groups[0]["lr"] = 1.0
        if left_out:
            leave_momentum_out(stepper, task)
        stepper.step()
        put_momentum_back(stepper, task)
        steps.append(float((before - weight.detach())[0]))
    assert steps == pytest.approx([1, 1.9, 10, 1, 1.9])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_factor_is_a_rate(kind: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("study.trainer.SMALL", 0)  # small tensors keep their momentum and rate
    task = tiny(weight_decay=0.0, optimizer=kind, rate=0.02)
    half = replace(task, rate=0.01)
    names = {"1/4, no momentum, c = 0.5": task, "1/4, no momentum": half}
    one, other = (train(own, prepare(own, tmp_path), METHODS[name], 0) for name, own in names.items())
    assert one["loss"] == other["loss"]


@pytest.mark.parametrize(("left", "expected"), [(0.5, [5, 7.5, 8.75]), (0.9, [1, 1.9, 2.71]), (0.0, [10, 10, 10])])
def test_what_is_left_of_momentum_adds_up_to_the_same(left: float, expected: list[float]) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    task = tiny(weight_decay=0.0, rate=1.0)
    stepper = optimizer(task, [weight])
    steps = []
    for _ in expected:
        before = weight.detach().clone()
        weight.grad = torch.ones(3)
        stepper.param_groups[0]["lr"] = 1.0
        leave_momentum_out(stepper, task, left)
        stepper.step()
        put_momentum_back(stepper, task)
        steps.append(float((before - weight.detach())[0]))
    assert steps == pytest.approx(expected)
