"""What holds for any history and any metrics: policies and the controller."""

import json
import logging
import math

import horovod.torch as hvd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import (
    LEVELS,
    Controller,
    ControllerError,
    CriticalRegime,
    Meter,
    Plateau,
    Record,
    Schedule,
    Static,
    StepFunction,
)
from hvd_dyncomp.policies.metrics import weighted_means

pytestmark = pytest.mark.promise("Codec, policies and controller keep their invariants for any input.")

COMPRESSED = [bits for bits in LEVELS if bits < 32]
ORDINARY = settings(max_examples=200, deadline=None)


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()
    logging.disable(logging.ERROR)  # thousands of warnings about metrics
    yield
    logging.disable(logging.NOTSET)


# Policies

FINITE = st.floats(allow_nan=False, allow_infinity=False)
LIKELY = st.floats(0, 1) | FINITE


@st.composite
def step_functions(draw):
    levels = sorted(draw(st.sets(st.sampled_from(COMPRESSED), min_size=1, max_size=4)))
    thresholds = draw(st.lists(LIKELY, min_size=len(levels) - 1, max_size=len(levels) - 1, unique=True))
    return StepFunction(
        levels[:: draw(st.sampled_from([1, -1]))],
        sorted(thresholds),
        loss=draw(st.sampled_from([None, "train_loss"])),
        min_improvement=draw(st.floats(0, 0.99)),
        loss_patience=draw(st.integers(1, 4)),
        stagnation=draw(st.sampled_from([None, "time", "plateau"])),
        stagnation_patience=draw(st.integers(0, 4)),
        uncompressed_epochs=draw(st.integers(1, 3)),
        cooldown=draw(st.integers(0, 3)),
        uncompressed_at_top=draw(st.booleans()),
        total_epochs=draw(st.none() | st.integers(1, 30)),
    )


@st.composite
def schedules(draw):
    level = st.sampled_from(LEVELS)
    return Schedule({**draw(st.dictionaries(st.integers(0, 40), level)), 0: draw(level)})


@st.composite
def ladders(draw, levels=LEVELS):
    return sorted(draw(st.sets(st.sampled_from(levels), min_size=1, max_size=4)))


@st.composite
def plateaus(draw):
    mode = draw(st.sampled_from(["rel", "abs"]))
    return Plateau(
        draw(ladders()),
        monitor=draw(st.sampled_from(["val_accuracy", "train_loss"])),
        mode=draw(st.sampled_from(["min", "max"])),
        patience=draw(st.integers(0, 4)),
        threshold=draw(st.floats(0, 0.99) if mode == "rel" else st.floats(0, allow_infinity=False)),
        threshold_mode=mode,
        cooldown=draw(st.integers(0, 3)),
    )


@st.composite
def critical_regimes(draw):
    low, high = sorted(draw(st.sets(st.sampled_from(LEVELS), min_size=2, max_size=2)))
    eta, interval = draw(st.floats(0, 10)), draw(st.integers(1, 4))
    return CriticalRegime(low, high, monitor="train_loss", eta=eta, interval=interval)


STATIC = st.builds(Static, st.sampled_from(LEVELS))
POLICIES = step_functions() | plateaus() | critical_regimes() | schedules() | STATIC
METRICS = st.fixed_dictionaries({"val_accuracy": LIKELY, "train_loss": LIKELY})


@st.composite
def histories(draw):
    """Records of epochs that ascend, with gaps."""
    gaps = draw(st.lists(st.integers(1, 3), max_size=25))
    return [Record(sum(gaps[: i + 1]) - 1, draw(METRICS)) for i in range(len(gaps))]


def same_but_decided_otherwise(record):
    return Record(record.epoch, record.metrics, 1, "another reason")


@ORDINARY
@given(policy=POLICIES, history=histories())
def test_a_decision_follows_from_the_metrics_so_far(policy, history):
    """No state, no error whatever the numbers, the same answer for the same epochs: that makes a resumed run exact."""
    prefixes = [history[:length] for length in range(len(history) + 1)]
    decisions = [policy.decide(prefix) for prefix in prefixes]
    backwards = [policy.decide([*map(same_but_decided_otherwise, prefix)]) for prefix in reversed(prefixes)]
    assert backwards[::-1] == decisions
    assert json.loads(json.dumps(policy.config())) == policy.config()
    for bits, reason in decisions:
        assert bits in LEVELS and isinstance(reason, str) and reason


@ORDINARY
@given(policy=step_functions(), history=histories())
def test_levels_never_go_back_and_are_as_far_as_what_was_reached(policy, history):
    reached = 0
    levels = [policy.decide(history[:length]).bits for length in range(len(history) + 1)]
    assert set(levels) <= {*policy.levels, 32}
    places = [policy.levels.index(bits) for bits in levels if bits < 32]
    assert places == sorted(places)
    for record, bits in zip(history, levels[1:], strict=True):
        reached = max(reached, sum(record.metrics["val_accuracy"] >= t for t in policy.thresholds))
        assert bits == 32 or policy.levels.index(bits) >= reached


@ORDINARY
@given(policy=plateaus(), history=histories())
def test_a_plateau_climbs_its_ladder_step_by_step(policy, history):
    levels = [policy.decide(history[:length]).bits for length in range(len(history) + 1)]
    places = [policy.levels.index(bits) for bits in levels]
    rises = [epoch for epoch, (a, b) in enumerate(zip(places, places[1:], strict=False)) if a != b]
    assert all(places[epoch + 1] == places[epoch] + 1 for epoch in rises) and places[0] == 0
    # The first bad epoch is the one after a rise, its cooldown over; and the first of all is never bad.
    assert all(b - a > max(policy.patience, policy.cooldown) for a, b in zip(rises, rises[1:], strict=False))
    assert not rises or rises[0] > policy.patience


@ORDINARY
@given(policy=critical_regimes(), history=histories())
def test_a_regime_is_looked_at_every_interval(policy, history):
    levels = [policy.decide(history[:length]).bits for length in range(len(history) + 1)]
    assert set(levels) <= {policy.low, policy.high} and set(levels[: 2 * policy.interval]) == {policy.high}
    for length in range(1, len(levels)):
        assert levels[length] == levels[length - 1] or length % policy.interval == 0


@ORDINARY
@given(policy=schedules(), history=histories())
def test_a_schedule_is_what_it_says(policy, history):
    following = history[-1].epoch + 1 if history else 0
    assert policy.decide(history).bits == next(policy.levels[e] for e in range(following, -1, -1) if e in policy.levels)


# Controller

ANY = st.sampled_from([math.nan, math.inf, -math.inf]) | st.floats(0, 1) | st.floats()
EPOCHS = st.lists(
    st.fixed_dictionaries({"val_accuracy": ANY, "train_loss": ANY}) | st.dictionaries(st.sampled_from("ab"), ANY),
    max_size=20,
)


PATIENCE = st.integers(1, 3)


def stepped(controller, epochs):
    """The level after each epoch, or None where the policy could not decide."""
    levels = []
    for metrics, ahead in epochs:
        try:
            levels.append(controller.step(metrics, epoch=controller.epoch + ahead))
        except ControllerError as error:
            assert "must contain" in str(error)
            levels.append(None)
    return levels


@ORDINARY
@given(data=st.data(), policy=POLICIES, epochs=EPOCHS, on_error=st.sampled_from(["raise", "hold"]), patience=PATIENCE)
def test_a_resumed_controller_goes_on_alike_whatever_the_metrics(policy, epochs, data, on_error, patience):
    epochs = [(metrics, data.draw(st.sampled_from([0, 0, 0, 1, 5]))) for metrics in epochs]
    cut = data.draw(st.integers(0, len(epochs)))
    whole, first, second = (Controller(policy, on_error=on_error, nan_patience=patience) for _ in range(3))
    expected = stepped(whole, epochs)
    assert stepped(first, epochs[:cut]) == expected[:cut]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert json.dumps(second.state_dict()) == json.dumps(first.state_dict())  # as text, a NaN equals itself
    assert stepped(second, epochs[cut:]) == expected[cut:]
    assert json.dumps(second.state_dict()) == json.dumps(whole.state_dict())


@ORDINARY
@given(policy=POLICIES, epochs=EPOCHS, patience=PATIENCE)
def test_the_history_says_what_happened(policy, epochs, patience):
    controller = Controller(policy, on_error="hold", nan_patience=patience)
    before, in_a_row = controller.bits, 0
    for number, metrics in enumerate(epochs):
        bits = controller.step(metrics)
        record = controller.history[-1]
        assert bits == controller.bits == record.bits and bits in LEVELS
        assert (controller.epoch, record.epoch, len(controller.history)) == (number + 1, number, number + 1)
        assert {
            key: pytest.approx(value, rel=0, abs=0, nan_ok=True) for key, value in metrics.items()
        } == record.metrics
        finite = all(math.isfinite(value) for value in metrics.values())
        in_a_row = 0 if finite else in_a_row + 1
        if not finite:
            assert not record.usable and bits == (32 if in_a_row >= patience else before)
        elif not record.usable:
            assert bits == before and record.reason.startswith("held")
        before = bits


REPORTS = st.lists(st.tuples(ANY, st.floats(0, allow_infinity=False)), min_size=1, max_size=5)


@ORDINARY
@given(reports=REPORTS)
def test_a_mean_lies_between_its_values(reports):
    """Also where sums or products would leave the range of a float; a rank without samples does not count."""
    used = [value for value, weight in reports if weight > 0]
    if not used:
        return
    mean = weighted_means([{"metrics": {"a": value}, "weight": weight} for value, weight in reports])["a"]
    if all(map(math.isfinite, used)):
        assert min(used) <= mean <= max(used)
    else:
        assert not math.isfinite(mean)


@ORDINARY
@given(reports=st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(0, 1000)), min_size=1, max_size=5))
def test_a_mean_counts_every_sample_once(reports):
    total = sum(weight for _, weight in reports)
    if total:
        expected = sum(value * weight for value, weight in reports) / total
        means = weighted_means([{"metrics": {"a": value}, "weight": weight} for value, weight in reports])
        assert means["a"] == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("nothing", [math.nan, math.inf, 7.0])
def test_a_rank_without_samples_does_not_count(nothing):
    reports = [{"metrics": {"a": value}, "weight": weight} for value, weight in ((nothing, 0), (0.5, 3), (1.0, 1))]
    assert weighted_means(reports) == {"a": 0.625}


@ORDINARY
@given(data=st.data())
def test_meters_survive_json(data):
    meter = Meter()
    for epoch, bits in data.draw(st.sets(st.tuples(st.integers(0, 9), st.sampled_from(LEVELS)), max_size=6)):
        record = meter.at(epoch, bits)
        record.sent_bytes, record.steps = data.draw(st.floats(0, 1e18)), data.draw(st.integers(0, 2**40))
    other = Meter()
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert other.records == meter.records and other.total() == meter.total()
