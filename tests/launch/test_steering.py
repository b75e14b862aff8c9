"""Methods with a policy: what it is told, on which data, and that its level is the next epoch's."""

import math

import pytest
import torch

from hvd_dyncomp import CriticalRegime, Policy, Schedule, Static
from study import codec, tasks, text
from study.methods import METHODS, Method
from study.steering import Steering
from study.tasks import Task, Work, prepare
from study.trainer import train

STEERED = [method for method in METHODS.values() if method.policy is not None]


def tiny(**more) -> Task:
    return Task("tiny", **{"model": "mlp", "data": "digits", "limit": 256, "half_size": False, "epochs": 4, **more})


class Recording(Policy):
    """Says what a schedule says, and keeps what it is asked."""

    def __init__(self, levels: dict[int, float]) -> None:
        self.schedule, self.asked = Schedule(levels), []

    def decide(self, history):
        self.asked.append(list(history))
        return self.schedule.decide(history)

    def config(self):
        return self.schedule.config()


def work_of(scores: list[tuple[float, float]]) -> Work:
    """Validates as listed; can do nothing else."""
    given = iter(scores)
    return Work(None, 1, None, None, None, lambda model: next(given))  # type: ignore[arg-type]


def test_a_policy_is_asked_after_every_epoch_with_what_was_measured() -> None:
    model = torch.nn.Linear(2, 1)
    policy = Recording({0: 2, 1: 1, 2: 1 / 4})
    steering = Steering(policy, work_of([(50.0, 1.5), (75.0, 0.5)]), model)
    assert steering.bits == 2
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    steering.stepped()
    noted = steering.after(0, 2.5)
    metrics = {"train_loss": 2.5, "val_accuracy": 0.5, "val_loss": 1.5, "gradient_norm": math.sqrt(12)}
    assert noted["level"] == 2 and noted["reason"] == "scheduled from epoch 1" and steering.bits == 1
    assert policy.asked[-1][0].metrics == pytest.approx(metrics)
    steering.after(1, 2.0)
    assert [record.epoch for record in policy.asked[-1]] == [0, 1] and steering.bits == 1 / 4


def test_an_epoch_that_is_not_finite_holds_the_level_and_is_not_seen() -> None:
    policy = Recording({0: 2, 1: 1})
    steering = Steering(policy, work_of([(10.0, math.nan), (10.0, 2.0)]), torch.nn.Linear(2, 1))
    assert steering.after(0, 1.0)["reason"] == "held: not finite" and steering.bits == 2
    steering.after(1, 1.0)
    assert [[record.epoch for record in asked] for asked in policy.asked] == [[], [1]] and steering.bits == 1


def test_without_a_policy_nothing_is_measured() -> None:
    steering = Steering(None, work_of([]), torch.nn.Linear(2, 1))
    steering.stepped()
    assert steering.bits is None and steering.after(0, 1.0) == {}


def test_levels_are_those_that_the_policy_says(tmp_path) -> None:
    task = tiny(epochs=3)
    work = prepare(task, tmp_path)
    levels = {0: 2, 1: 1 / 4, 2: 1}
    found = train(task, work, Method("x", policy=Schedule(levels)), seed=0)
    assert [entry["level"] for entry in found["curve"]] == list(levels.values())
    assert [entry["at_bits"] for entry in found["curve"]] == list(levels.values())
    assert all(entry["gradient_norm"] > 0 for entry in found["curve"]), "every step's gradients are looked at"
    fixed = train(task, work, METHODS["1/4"], seed=0)
    steered = train(task, work, Method("x", policy=Static(1 / 4)), seed=0)
    assert all(steered[key] == fixed[key] for key in ("score", "loss", "bits"))


@pytest.mark.parametrize("method", STEERED, ids=lambda method: method.name)
def test_every_policy_learns_and_can_be_repeated(method: Method, tmp_path) -> None:
    task = tiny(epochs=5)
    work = prepare(task, tmp_path)
    runs = [train(task, work, method, seed=1) for _ in range(2)]
    assert [run.pop("seconds") >= 0 for run in runs] == [True, True]
    assert runs[0] == runs[1] and runs[0]["score"] > 50
    levels = [entry["level"] for entry in runs[0]["curve"]]
    assert set(levels) <= set(codec.LEVELS) and levels[0] == method.policy.decide([]).bits


def test_a_steered_epoch_is_one_of_that_level() -> None:
    for method in STEERED:
        for bits in (1 / 8, 2, 4, 8):
            at, plain = method.at(bits), Method("x", budget=((0.0, bits),))
            assert at.bits_at(0.5) == bits
            assert at.small_bits_at(0.5) == plain.small_bits_at(0.5)
            assert at.keeps_momentum_at(0.5) == plain.keeps_momentum_at(0.5) == (bits > 2)


def test_there_are_policies_in_both_directions() -> None:
    first = {method.name: method.policy.decide([]).bits for method in STEERED}
    assert {"plateau 1/8-1/2": 1 / 8, "step 1/8-1/4-1/2": 1 / 8, "step down 1-1/4-1/8": 1}.items() <= first.items()
    assert first["critical 1/8-1"] == 1 and first["critical 1/8-2"] == 2


def test_only_what_has_levels_can_be_steered() -> None:
    with pytest.raises(ValueError, match="levels to choose"):
        Method("x", "top-k", policy=CriticalRegime())


def test_images_that_policies_see_are_no_others(tmp_path, monkeypatch) -> None:
    task = tiny()
    data = tasks.load(task.data, tmp_path, limit_train=task.limit)
    seen = []
    monkeypatch.setattr(tasks, "_score", lambda model, batches: seen.append(torch.cat([x for x, _ in batches])))
    prepare(task, tmp_path).validate(None)
    [images] = seen
    assert len(images) == min(1000, len(data.val))
    monkeypatch.undo()
    rows = {split: {row.numpy().tobytes() for row in getattr(data, split).images} for split in ("train", "val")}
    # A digit or two may have been scanned twice.
    assert len(rows["train"] & rows["val"]) < 0.05 * len(rows["val"])


def test_text_that_policies_see_comes_after_all_that_is_trained_with_and_tested_on(monkeypatch) -> None:
    task = tiny(model="transformer", data="docstrings", limit=20000)
    seen = []
    monkeypatch.setattr(tasks, "_score", lambda model, batches: seen.append(torch.cat([x for x, _ in batches])))
    work = prepare(task, None)
    work.validate(None)
    work.score(None, True)
    everything, length = text.docstrings(21000), task.context + 1
    held_out, test = everything[20000:], everything[18000:20000]
    for [part, pieces] in ((held_out, seen[0]), (test, seen[1])):
        expected = part[: len(part) // length * length].view(-1, length)[:, :-1]
        assert torch.equal(pieces, expected)
    [batch] = [next(work.epoch(0, 0))]
    assert all(inputs.shape == (task.batch, task.context) for inputs, _ in batch)
