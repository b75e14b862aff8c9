"""`LinkAware`, replayed over made-up links: a step waits for its bits times a rate, less what backward hides."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import Controller, ControllerError, LinkAware, Record
from hvd_dyncomp.simulate import World

LEVELS = (2, 4, 8, 16, 32)
SLOW = 0.25  # of the time of computing, for each bit


def run(
    epochs: int,
    per_bit: Callable[[int], float],
    *,
    hidden: float = 0.0,
    other: float = 0.0,
    levels: tuple[float, ...] = LEVELS,
) -> tuple[list[float], list[float]]:
    """The level of each epoch, and its time: 1 is what computing takes.

    Args:
        per_bit: by epoch.
        hidden: how much of an exchange backward hides.
        other: waiting that no link causes.
    """
    policy, history, bits, times = LinkAware(levels), [], [], []
    for epoch in range(epochs):
        bits.append(policy.decide(history).bits)
        waited = max(0.0, per_bit(epoch) * bits[-1] - hidden) + other
        times.append(1 + waited)
        history.append(Record(epoch, {"waited": waited / (1 + waited)}))
    return bits, times


def test_a_fast_link_gets_more_bits_every_two_epochs():
    assert run(9, lambda epoch: 0.0)[0] == [8, 8, 16, 16, 32, 32, 32, 32, 32]


def test_on_a_slow_link_the_level_falls_at_once_as_far_as_needed():
    assert run(6, lambda epoch: SLOW)[0] == [8, 2, 2, 2, 2, 2]
    assert run(3, lambda epoch: 0.01)[0] == [8, 4, 4]


def test_a_rise_that_makes_training_wait_is_taken_back_and_tried_ever_more_seldom():
    bits, _ = run(60, lambda epoch: 0.02, hidden=0.4)  # 16 bits are hidden, and 32 are not
    tries = [epoch for epoch, level in enumerate(bits) if level == 32]
    assert tries == [4, 9, 18, 35, 52] and set(bits[4:]) == {16, 32}


def test_waiting_that_does_not_depend_on_the_bits_takes_no_bits():
    """Batches of unequal length: each rank waits for another one in turn."""
    bits, _ = run(40, lambda epoch: 0.0, other=0.12)
    assert bits[:3] == [8, 2, 8] and set(bits[3:]) == {8, 16, 32} and set(bits[10:]) == {32}


def test_a_link_that_changes():
    bits, times = run(80, lambda epoch: SLOW if 20 <= epoch < 50 else 0.0, hidden=0.1)
    assert set(bits[10:20]) == {32} and set(bits[21:50]) == {2} and set(bits[60:]) == {32}
    assert max(times[21:50]) < 1.5 < times[20] and max(times[50:]) == 1


def test_a_link_that_becomes_slow_in_the_epoch_after_a_fall():
    """Training then waits for longer although it has fewer bits, which does not mean that bits do not matter."""
    bits, _ = run(12, lambda epoch: 0.01 if epoch == 0 else 0.2)
    assert bits == [8, 4] + [2] * 10


def test_tries_that_were_in_vain_on_a_slow_link_do_not_delay_the_first_one_on_a_fast_link():
    bits, _ = run(60, lambda epoch: 0.12 if epoch < 30 else 0.0, hidden=0.1)  # at 2 bits it waits, but not long
    assert bits[:30].count(4) == 3 and bits[30:34] == [2, 4, 4, 8]


RATES = st.floats(0, 0.5)


@settings(deadline=None)
@given(per_bit=RATES, hidden=st.floats(0, 1))
def test_on_a_constant_link_epochs_get_within_five_percent_of_the_best_level(per_bit, hidden):
    """But for one try in 17 epochs, in which it takes no longer than twice the bits do."""
    bits, times = run(100, lambda epoch: per_bit, hidden=hidden)
    best = min(1 + max(0.0, per_bit * level - hidden) for level in LEVELS)
    late = sorted(times[40:])
    assert late[-5] <= 1.06 * best  # 5 percent of the time are 5.3 percent of the rest


SHARES = st.lists(st.floats(0, 1) | st.sampled_from([0.0, 0.04, 0.06, 0.1, 0.2, 0.5, 1.0]), max_size=60)


@settings(deadline=None)
@given(shares=SHARES, levels=st.sampled_from([LEVELS, (4, 8), (2, 4, 8), (0.25, 32), (1, 2, 3, 4, 5, 6)]))
def test_it_cannot_oscillate_every_epoch(shares, levels):
    """Whatever the shares: a level that was taken back stays for two epochs, or gives way to a third one."""
    policy = LinkAware(levels)
    history = [Record(epoch, {"waited": share}) for epoch, share in enumerate(shares)]
    bits = [policy.decide(history[:length]).bits for length in range(len(history) + 1)]
    assert set(bits) <= set(levels)
    for one, two, three, four in zip(bits, bits[1:], bits[2:], bits[3:], strict=False):
        assert not (one == three != two == four)


@given(shares=SHARES)
def test_a_resumed_run_goes_through_the_same_levels(shares):
    """Whatever was decided, and by whom, does not matter to what comes next."""
    records = [Record(epoch, {"waited": share, "a": 1.0}, bits=4) for epoch, share in enumerate(shares)]
    plain = [Record(record.epoch, {"waited": record.metrics["waited"]}) for record in records]
    assert LinkAware().decide(records) == LinkAware().decide(plain)


def test_why_is_said():
    def said(*shares: float) -> str:
        return LinkAware().decide([Record(epoch, {"waited": share}) for epoch, share in enumerate(shares)]).reason

    assert said() == "start" and said(0.01) == "waited 0.01: hold"
    assert said(0.01, 0.02) == "waited 0.02: tries more bits"
    assert said(0.2) == "waited 0.2 exceeds 0.05"
    assert said(0.01, 0.02, 0.2) == "waited 0.2 exceeds 0.05: takes the rise back"
    assert said(0.2, 0.2) == "waited 0.2, as with more bits: takes the fall back"
    assert said(0.8, 0.4, 0.4) == "waited 0.4: hold, as more bits would take too long"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"levels": (8,)}, r"levels must be two or more, got \(8,\)"),
        ({"levels": (8, 4)}, r"levels must be one or more ascending levels, got \(8, 4\)"),
        ({"most": 0}, "most must be more than 0 and less than 1, got 0"),
        ({"most": 5}, "most must be more than 0 and less than 1, got 5"),
        ({"monitor": ""}, "monitor must be the name of a metric, got ''"),
    ],
)
def test_wrong_arguments(arguments, said):
    with pytest.raises(ValueError, match=said):
        LinkAware(**arguments)


def test_a_metric_that_is_missing_or_in_percent_is_an_error_that_says_what_to_write():
    with pytest.raises(ValueError, match=r"write controller.step\(\{'waited': quantizer.meter.waited\(\), ...\}\)"):
        LinkAware().decide([Record(0, {"val_loss": 1.0})])
    with pytest.raises(ValueError, match=r"metrics\['waited'\] must be a share from 0 to 1, got 12.0"):
        LinkAware().decide([Record(0, {"waited": 12.0})])


@pytest.mark.parametrize("samples", [1, 0])
def test_the_least_of_all_ranks_counts_whatever_they_have_validated(samples):
    """Of other metrics the mean."""

    def program(transport):
        controller = Controller(LinkAware(), transport=transport)
        slow = transport.rank == 2  # it waits for nobody
        metrics = {"waited": 0.01 if slow else 0.6, "loss": 3.0 if slow else 1.0}
        controller.step(metrics, num_samples=samples if slow else 1)
        return controller.bits, controller.history[0].metrics

    loss = (1 + 1 + 3 * samples) / (2 + samples)
    assert World(3).run(program) == [(8, {"loss": pytest.approx(loss), "waited": 0.01})] * 3


def test_a_share_that_is_no_number_on_one_rank_holds_the_level():
    def program(transport):
        controller = Controller(LinkAware(), transport=transport)
        return controller.step({"waited": [0.9, float("nan")][transport.rank]}), controller.history[0].reason

    assert World(2).run(program) == [(8, "held: waited not finite")] * 2


def test_all_ranks_hear_of_a_metric_that_is_missing():
    def program(transport):
        with pytest.raises(ControllerError, match="metrics must contain 'waited', which LinkAware watches"):
            Controller(LinkAware(), transport=transport).step({"val_loss": 1.0})

    World(2).run(program)


def test_least_is_checked_when_the_controller_is_made():
    class Wrong(LinkAware):
        least = "waited"

    with pytest.raises(TypeError, match="policy must have names of metrics in least, got 'waited'"):
        Controller(Wrong())
