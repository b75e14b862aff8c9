"""Policies are pure Python: every rule, on histories made by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS, Plateau, Record, Schedule, Static, StepFunction


def trace(policy, accuracies, losses=None):
    """The level of every epoch, and of the one after the last."""
    losses = losses or [0.5**epoch for epoch in range(len(accuracies))]
    history, levels = [], [policy.decide([]).bits]
    for epoch, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True)):
        record = Record(epoch, {"val_accuracy": accuracy, "train_loss": loss})
        decision = policy.decide([*history, record])
        history.append(Record(epoch, record.metrics, *decision))
        levels.append(decision.bits)
    return levels


def ladder(**arguments):
    return StepFunction(levels=(4, 8, 16), thresholds=(0.5, 0.8), **arguments)


def test_levels_climb_with_accuracy_and_never_fall():
    assert trace(ladder(), [0.1, 0.5, 0.2, 0.79, 0.8, 0.1]) == [4, 4, 8, 8, 8, 16, 16]


def test_a_ladder_may_descend_and_is_never_climbed_back():
    down = StepFunction(levels=(16, 8, 4), thresholds=(0.5, 0.8))
    assert trace(down, [0.1, 0.5, 0.2, 0.79, 0.8, 0.1]) == [16, 16, 8, 8, 8, 4, 4]
    losses = [1.0, 0.999, 0.998, 0.997, 0.996, 0.995, 0.994]
    assert trace(down, [0.1] * 7, losses) == [16, 16, 16, 16, 8, 8, 8, 4]
    # Its last step is what an ascending ladder's top is.
    assert 32 not in trace(down, [0.9] * 30)
    assert 32 in trace(down, [0.1] * 9)


def test_a_step_can_be_skipped():
    assert trace(ladder(), [0.9]) == [4, 16]


def test_a_stalled_loss_raises_the_step_after_loss_patience_epochs_in_a_row():
    losses = [1.0, 0.999, 0.998, 0.997, 0.996, 0.995, 0.994]
    assert trace(ladder(), [0.1] * 7, losses) == [4, 4, 4, 4, 8, 8, 8, 16]
    # An epoch of progress in between starts the count anew.
    assert trace(ladder(), [0.1] * 5, [1.0, 0.999, 0.998, 0.5, 0.499]) == [4] * 6
    assert trace(ladder(loss=None, stagnation=None), [0.1] * 7, losses) == [4] * 8


def test_the_loss_counts_by_fractions_of_itself():
    losses = [1.0, 0.995, 0.99, 0.985, 0.9, 0.8, 0.799, 0.798, 0.797]
    expected = trace(ladder(), [0.1] * 9, losses)
    assert 8 in expected and 16 in expected
    for scale in (2.0**-20, 2.0**20):
        assert trace(ladder(), [0.1] * 9, [scale * loss for loss in losses]) == expected


def test_slow_epochs_of_a_release_do_not_count():
    policy = ladder(loss_patience=3, stagnation="time", stagnation_patience=1, uncompressed_epochs=2, cooldown=9)
    assert trace(policy, [0.1] * 7, [1.0] * 7) == [4, 4, 32, 32, 4, 4, 4, 8]


def test_a_step_that_is_raised_spends_an_epoch_of_the_cooldown():
    policy = ladder(loss=None, stagnation="time", stagnation_patience=0, uncompressed_epochs=1, cooldown=2)
    assert trace(policy, [0.1, 0.1, 0.6, 0.6, 0.6]) == [4, 32, 4, 8, 8, 32]


def test_training_that_goes_on_is_not_released():
    """Forty epochs below the first threshold, in which the accuracy has a new best every third epoch."""
    rising = [0.3 + 0.004 * epoch - 0.01 * (epoch % 3) for epoch in range(40)]
    losses = [0.95**epoch for epoch in range(40)]
    assert trace(ladder(), rising, losses) == [4] * 41
    assert trace(ladder(), [0.3] * 40, losses)[:8] == [4] * 7 + [32]
    assert trace(ladder(stagnation="time"), rising, losses)[:40].count(32) == 7


def test_stagnation_in_time_releases_and_returns():
    policy = ladder(stagnation="time", stagnation_patience=2, uncompressed_epochs=2, cooldown=1)
    # Three epochs at the step exceed patience; two at 32; cooldown, and three more.
    assert trace(policy, [0.1] * 12) == [4, 4, 4, 32, 32, 4, 4, 4, 4, 32, 32, 4, 4]
    history = [Record(epoch, {"val_accuracy": 0.1, "val_loss": 1.0}) for epoch in range(3)]
    assert policy.decide(history).reason == "uncompressed: 3 epochs at 4 bits"


def test_a_plateau_is_counted_from_the_best_value():
    policy = ladder(stagnation_patience=2, uncompressed_epochs=1, cooldown=0)
    assert trace(policy, [0.1, 0.2, 0.3, 0.3, 0.25, 0.3, 0.31]) == [4, 4, 4, 4, 4, 4, 32, 4]


def test_no_release_at_the_top_unless_asked():
    assert 32 not in trace(ladder(), [0.9] * 30)
    assert 32 in trace(ladder(uncompressed_at_top=True), [0.9] * 30)
    assert 32 not in trace(ladder(stagnation=None), [0.1] * 30)


def test_no_release_that_could_not_finish():
    arguments = {"stagnation": "time", "stagnation_patience": 2, "uncompressed_epochs": 2}
    assert trace(ladder(total_epochs=5, **arguments), [0.1] * 5)[3:5] == [32, 32]
    assert 32 not in trace(ladder(total_epochs=4, **arguments), [0.1] * 4)


def test_a_threshold_reached_in_a_release_counts_when_it_ends():
    policy = ladder(stagnation="time", stagnation_patience=2, uncompressed_epochs=2)
    assert trace(policy, [0.1, 0.1, 0.1, 0.6, 0.1]) == [4, 4, 4, 32, 32, 8]


@given(
    accuracies=st.lists(st.floats(0, 1), max_size=40),
    patience=st.integers(0, 4),
    release=st.integers(1, 3),
    cooldown=st.integers(0, 3),
    stagnation=st.sampled_from(["time", "plateau", None]),
)
def test_invariants(accuracies, patience, release, cooldown, stagnation):
    policy = StepFunction(
        levels=(1, 2, 4),
        thresholds=(0.4, 0.7),
        stagnation=stagnation,
        stagnation_patience=patience,
        uncompressed_epochs=release,
        cooldown=cooldown,
    )
    levels = trace(policy, accuracies)
    assert set(levels) <= {1, 2, 4, 32}
    compressed = [bits for bits in levels if bits != 32]
    assert compressed == sorted(compressed), "the ratchet fell"
    text = "".join("r" if bits == 32 else "c" for bits in levels)
    runs = [run for run in text.split("c") if run]
    assert all(len(run) == release for run in runs[:-1]) and all(len(run) <= release for run in runs)
    # Deterministic, and dependent on the metrics alone: a resumed run continues as if it had not stopped.
    assert levels == trace(policy, accuracies)


@pytest.mark.parametrize(
    ("thresholds", "monitor", "value", "says"),
    [
        ((80.0, 88.0), "val_accuracy", 0.34, "never leave the first step"),
        ((0.8, 0.88), "Acc@1", 34.0, "go to the last step at once"),
        ((0.8, 0.88), "val_accuracy", 0.34, ""),
        ((80.0, 88.0), "val_accuracy", 34.0, ""),
        ((80.0, 88.0), "val_accuracy", 0.0, ""),
        ((20.0, 25.0), "psnr", 0.34, ""),
    ],
)
def test_percent_beside_fractions_is_said_once(thresholds, monitor, value, says, caplog):
    policy = StepFunction(thresholds=thresholds, monitor=monitor)
    records = [Record(epoch, {monitor: value, "train_loss": 1.0}) for epoch in range(3)]
    for finished in range(4):
        policy.decide(records[:finished])
    assert [says in record.getMessage() for record in caplog.records] == [True] * bool(says)


def test_schedule():
    assert trace(Schedule({2: 4, 0: 32, 4: 8}), [0.0] * 5) == [32, 32, 4, 4, 8, 8]


def test_static():
    assert trace(Static(3), [0.9] * 3) == [3] * 4


SLOW, FAST = [1.0 - 0.001 * epoch for epoch in range(8)], [0.5**epoch for epoch in range(8)]


def decisions(policy, metrics):
    records = [Record(epoch, each) for epoch, each in enumerate(metrics)]
    return [policy.decide(records[:length]) for length in range(len(records) + 1)]


@pytest.mark.parametrize(
    ("accuracy", "loss"),
    [("val_accuracy", "train_loss"), ("val_accuracy", "val_loss"), ("eval_accuracy", "eval_loss")],
)
def test_names_of_frameworks_need_no_argument(accuracy, loss):
    """Lightning's and Transformers': as if they had been given."""
    metrics = [{accuracy: 0.3 + 0.1 * epoch, loss: SLOW[epoch], "epoch": epoch} for epoch in range(8)]
    got = decisions(ladder(), metrics)
    assert got == decisions(ladder(monitor=accuracy, loss=loss), metrics)
    assert {accuracy, loss} <= {word for decision in got for word in decision.reason.split()}


def test_what_is_watched_is_what_the_first_epoch_has():
    """Metrics that come and go later are not mixed with it, and no level falls on their account."""
    both = [{"val_accuracy": 0.1, "val_loss": SLOW[i], "train_loss": FAST[i]} for i in range(8)]
    late = [{"val_accuracy": 0.1, "val_loss": SLOW[0]}, *both[1:]]  # Lightning's first epoch
    watched = {name: decisions(ladder(loss=name), both) for name in ("train_loss", "val_loss")}
    assert watched["train_loss"] != watched["val_loss"]
    assert decisions(ladder(), both) == watched["train_loss"]
    assert decisions(ladder(), late) == watched["val_loss"]
    stalls = [{"eval_accuracy": 0.1, "train_loss": SLOW[i], "eval_loss": FAST[i]} for i in range(8)]
    for gone in range(4, 7):
        metrics = [*stalls[:gone], *({"eval_accuracy": 0.1, "eval_loss": each["eval_loss"]} for each in stalls[gone:])]
        assert [decision.bits for decision in decisions(ladder(), metrics)] == [4] * 4 + [8] * 5


def test_epochs_without_a_loss_do_not_count_for_its_rule():
    metrics = [{"val_accuracy": 0.1, **({"train_loss": SLOW[i]} if i % 2 else {})} for i in range(8)]
    alone = [{"val_accuracy": 0.1}] * 8
    off = decisions(ladder(loss=None), alone)
    assert decisions(ladder(), alone) == off
    assert [decision.bits for decision in decisions(ladder(stagnation=None), metrics)] == [4] * 8 + [8]
    # A loss that was given must be there.
    with pytest.raises(ValueError, match="'train_loss'"):
        decisions(ladder(loss="train_loss"), metrics)


@pytest.mark.parametrize(
    ("arguments", "metrics", "line"),
    [
        ({}, {"accuracy": 1.0, "eval_loss": 1.0}, "StepFunction(monitor='accuracy')"),
        ({}, {"eval_loss": 1.0, "runtime": 1.0}, "Plateau(monitor='eval_loss')"),
        ({}, {"train_loss": 1.0, "val_loss": 1.0}, "Plateau(monitor='val_loss')"),
        ({}, {"runtime": 1.0}, "controller.step({'val_accuracy': ...})"),
        ({}, {}, "controller.step({'val_accuracy': ...})"),
        ({"monitor": "Acc@1"}, {"Acc@5": 1.0}, "StepFunction(monitor='Acc@5')"),
        ({"loss": "loss"}, {"val_accuracy": 1.0, "val_loss": 1.0}, "StepFunction(loss='val_loss')"),
        ({"loss": "loss"}, {"val_accuracy": 1.0}, "StepFunction(loss=None)"),
    ],
)
def test_a_missing_metric_is_named_and_what_to_write(arguments, metrics, line):
    name = arguments.get("monitor", arguments.get("loss", "val_accuracy"))
    with pytest.raises(ValueError, match=f"metrics must contain '{name}', which StepFunction watches; got") as caught:
        StepFunction(**arguments).decide([Record(0, metrics)])
    assert str(caught.value).endswith(f"got {sorted(metrics)}; write {line}")
    if line.startswith("controller") or "None" in line:
        return
    policy = eval(line, {"StepFunction": StepFunction, "Plateau": Plateau})  # noqa: S307  # the line above
    policy.decide([Record(0, metrics)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"levels": (8, 4, 16)}, "levels must be .*ascending.*8, 4, 16"),
        ({"levels": (16, 4, 8)}, "levels must be .*all descending.*16, 4, 8"),
        ({"levels": (8, 4, 4)}, "levels must be .*all descending"),
        ({"levels": (32, 8, 4)}, "levels must be below 32"),
        ({"levels": (4, 4, 8)}, "levels must be .*ascending"),
        ({"levels": (4, 8, 32)}, "levels must be below 32"),
        ({"thresholds": (0.5,)}, r"thresholds must be one fewer than levels \(2\)"),
        ({"thresholds": (0.8, 0.5)}, "thresholds must ascend"),
        ({"monitor": "eval_loss"}, "loss must be another metric than monitor, got 'eval_loss' for both"),
        ({"loss": "eval_accuracy"}, "loss must be another metric than monitor, got 'eval_accuracy' for both"),
        ({"monitor": "x", "loss": "x"}, "loss must be another metric than monitor, got 'x' for both"),
    ],
)
def test_bad_arguments_of_step_function(arguments, text):
    with pytest.raises(ValueError, match=text):
        StepFunction(**{"levels": (4, 8, 16), "thresholds": (0.5, 0.8), **arguments})


@pytest.mark.parametrize("bits", LEVELS)
def test_every_level_can_be_asked_for(bits):
    assert Static(bits).decide([]).bits == bits
