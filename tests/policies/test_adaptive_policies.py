"""Policies that follow a metric both ways or up a ladder: plateaus, critical regimes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hvd_dyncomp import CriticalRegime, Plateau, Record, StepFunction


def trace(policy, name, values):
    """The level of every epoch, and of the one after the last."""
    history = [Record(epoch, {name: value}) for epoch, value in enumerate(values)]
    return [policy.decide(history[:length]).bits for length in range(len(history) + 1)]


# Plateau


def test_the_level_rises_when_bad_epochs_exceed_patience():
    policy = Plateau(levels=(2, 4, 8), patience=1)
    assert trace(policy, "val_loss", [3, 2, 2, 2, 2, 2, 1, 1]) == [2, 2, 2, 2, 4, 4, 8, 8, 8]


def test_an_epoch_that_is_better_starts_the_count_anew():
    policy = Plateau(levels=(2, 4), patience=2)
    assert trace(policy, "val_loss", [3, 3, 3, 2, 2, 2, 2]) == [2] * 7 + [4]


def test_in_the_cooldown_none_counts_as_bad():
    policy = Plateau(levels=(2, 4, 8), patience=0, cooldown=2)
    assert trace(policy, "val_loss", [1, 1, 1, 1, 1, 1]) == [2, 2, 4, 4, 4, 8, 8]


def test_greater_may_be_better():
    values = [0.5, 0.6, 0.6, 0.6]
    assert trace(Plateau((2, 4), monitor="a", mode="max", patience=1), "a", values) == [2, 2, 2, 2, 4]
    assert trace(Plateau((2, 4), monitor="a", mode="max", patience=1), "a", [0.5, 0.6, 0.7, 0.8]) == [2] * 5


@pytest.mark.parametrize(("prefix", "other"), [("val", "eval"), ("eval", "val")])
@pytest.mark.parametrize(("mode", "what", "better"), [("min", "loss", 0.1), ("max", "accuracy", 0.9)])
def test_names_of_frameworks_need_no_argument(mode, what, better, prefix, other):
    policy = Plateau((2, 4), mode=mode, patience=0)
    assert trace(policy, f"{prefix}_{what}", [0.5, 0.5]) == [2, 2, 4]
    # One that comes later does not take its place.
    first = {f"{prefix}_{what}": 0.5, "train_loss": 0.5}
    later = {**first, f"{other}_{what}": better, "train_loss": 0.1}
    assert policy.decide([Record(0, first), Record(1, later)]).bits == 4


def test_why_is_said():
    history = [Record(epoch, {"val_loss": 0.5}) for epoch in range(3)]
    policy = Plateau(levels=(2, 4), patience=0)
    said = [policy.decide(history[:length]).reason for length in range(4)]
    assert said == ["start", "hold", "1 epochs without a better val_loss than 0.5", "hold"]


@settings(deadline=None)  # the first scheduler takes seconds to import what it needs
@given(
    values=st.lists(st.floats(0.01, 10) | st.sampled_from([0.5, 0.9, 1.0]) | st.floats(-2, 2), max_size=40),
    mode=st.sampled_from(["min", "max"]),
    patience=st.integers(0, 3),
    threshold=st.floats(0, 0.99),
    threshold_mode=st.sampled_from(["rel", "abs"]),
    cooldown=st.integers(0, 3),
)
def test_levels_rise_when_torch_reduces_the_learning_rate(values, **arguments):
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, eps=0, **arguments)
    levels = (1, 2, 3, 4)
    expected = [1]
    for value in values:
        scheduler.step(value)
        reduced = round(-math.log2(optimizer.param_groups[0]["lr"]))
        expected.append(levels[min(reduced, 3)])
    assert trace(Plateau(levels, monitor="a", **arguments), "a", values) == expected


# CriticalRegime


def test_the_first_epochs_are_critical():
    policy = CriticalRegime(low=1, high=8, interval=3)
    assert trace(policy, "gradient_norm", [1.0] * 7) == [8] * 6 + [1, 1]


def test_a_norm_that_changes_fast_is_critical_whichever_way():
    policy = CriticalRegime(low=1, high=8, eta=0.5, interval=1)
    norms = [4.0, 2.1, 1.0, 1.4, 2.1, 2.0]
    assert trace(policy, "gradient_norm", norms) == [8, 8, 1, 8, 1, 8, 1]
    # At eta exactly, too; and what is compared are parts of the norm before, not amounts.
    assert trace(policy, "gradient_norm", [1.0, 0.5]) == [8, 8, 8]
    for scale in (2.0**-40, 2.0**40):
        assert trace(policy, "gradient_norm", [scale * norm for norm in norms]) == [8, 8, 1, 8, 1, 8, 1]


def test_norms_are_compared_an_interval_apart_and_in_between_the_level_holds():
    policy = CriticalRegime(low=1, high=8, eta=0.5, interval=2)
    #        compared:                          8    .    8    .    7    .    2    .    2
    assert trace(policy, "gradient_norm", [99.0, 8.0, 0.1, 8.0, 50, 7.0, 7.0, 2.0, 9, 2.0]) == [
        *(8, 8, 8, 8),  # nothing to compare with
        *(1, 1, 1, 1),
        *(8, 8),
        1,
    ]


def test_a_norm_of_zero_is_critical():
    assert trace(CriticalRegime(1, 8, interval=1), "gradient_norm", [0.0, 0.0]) == [8, 8, 8]


# All


WATCHED = [
    (Plateau(), "val_loss", "Plateau(monitor='accuracy', mode='max')"),
    (CriticalRegime(), "gradient_norm", "controller.step({'gradient_norm': ...})"),
]


@pytest.mark.parametrize(("policy", "name", "line"), WATCHED, ids=lambda value: type(value).__name__)
def test_a_missing_metric_is_named_and_who_watches_it_and_what_to_write(policy, name, line):
    with pytest.raises(ValueError, match=f"'{name}', which {type(policy).__name__} watches; got") as caught:
        policy.decide([Record(0, {"accuracy": 1.0})])
    assert str(caught.value).endswith(f"got ['accuracy']; write {line}")


@pytest.mark.parametrize(
    ("policy", "arguments", "text"),
    [
        (Plateau, {"levels": (8, 4)}, "levels must be .*ascending.*8, 4"),
        (Plateau, {"mode": "less"}, "mode must be 'min' or 'max', got 'less'"),
        (Plateau, {"threshold": 1}, "threshold must be less than 1 .*got 1"),
        (CriticalRegime, {"low": 5, "high": 5}, "high must be more bits than low.*got 5"),
    ],
)
def test_bad_arguments(policy, arguments, text):
    with pytest.raises(ValueError, match=text):
        policy(**arguments)


def test_a_plateau_may_end_uncompressed_and_be_measured_in_its_own_unit():
    assert Plateau((8, 32), threshold=3, threshold_mode="abs").levels == (8, 32)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        (lambda: StepFunction(monitor="val_loss", loss=None), True),
        (lambda: Plateau(monitor="val_loss", mode="max"), True),
        (lambda: Plateau(monitor="val_loss"), False),
        (lambda: StepFunction(), False),
    ],
)
def test_a_loss_of_which_more_is_better_is_doubted(policy, said, caplog):
    policy()
    assert ("higher values count as better" in caplog.text) == said


@pytest.mark.parametrize(
    ("monitor", "mode", "said"), [("Acc@1", "min", True), ("Acc@1", "max", False), ("nll", "min", False)]
)
def test_an_accuracy_of_which_less_is_better_is_doubted(monitor, mode, said, caplog):
    Plateau(monitor=monitor, mode=mode)
    assert ("for an accuracy, pass mode='max'" in caplog.text) == said
