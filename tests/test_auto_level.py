"""Which levels a quantizer uses, given how long steps take; no workers needed."""

import logging
import random
from collections import Counter

import pytest

from hvd_dyncomp.auto_level import AutoLevel

HIGHER = {0.25: (2, 4, 8, 16, 32), 4: (8, 16, 32), 8: (16, 32)}  # what is tried beside the controller's level


class Steps:
    """Steps of two ranks, whose duration depends on their level; rank 0's proposals reach both.

    A step at another level than the one before takes longer.
    """

    def __init__(self, seconds, noise=0.0):
        self.seconds, self.noise, self.now, self.spent = seconds, noise, 0.0, 0.0
        self.ranks = [AutoLevel() for _ in range(2)]
        self.random = random.Random(0)
        self.latest = 0

    def run(self, count, floor=4, epoch=0):
        levels = []
        for _ in range(count):
            level = self.ranks[0].next_level(floor, epoch, self.now, leads=True)
            assert self.ranks[1].next_level(floor, epoch, 0.0, leads=False) == level, "ranks differ"
            assert self.ranks[1].proposal == 0
            spent = self.seconds(level) * (1 + self.noise * self.random.random())
            self.now += spent + 3 * (level != self.latest)
            self.spent += spent
            self.latest = level
            proposal = self.ranks[0].proposal
            for rank in self.ranks:
                rank.learn(proposal)
            levels.append(level)
        return levels


def slow_link(bits):
    """Transfer counts, and 32 bits spare the arithmetic."""
    return (0.3 if bits < 32 else 0.1) + 0.5 * bits


def fast_link(bits):
    return (1.3 if bits < 32 else 1.0) + 0.001 * bits


def medium_link(bits):
    """Up to 8 bits, transfer hides behind backward."""
    return max(1.0, 0.125 * bits) + (0.02 if bits < 32 else 0)


def alike(bits):
    return 1.0


def hardly_longer(bits):
    return 1.0 + 0.0009 * bits


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize(
    ("seconds", "best"), [(slow_link, 4), (fast_link, 32), (medium_link, 8), (alike, 32), (hardly_longer, 32)]
)
def test_the_most_bits_among_the_shortest_steps(seconds, best, noise):
    levels = Steps(seconds, noise).run(200)
    assert set(levels[:70]) <= {4, *HIGHER[4]}
    if noise and seconds in (alike, hardly_longer):  # which of them is as good as another
        assert len(set(levels[70:100])) == 1
    else:
        assert set(levels[70:]) == {best}


@pytest.mark.parametrize("floor", HIGHER)
def test_no_level_below_the_controllers_and_all_above_where_they_may_be_as_good(floor):
    levels = Steps(lambda bits: 1.5 if bits == 32 else 1.0).run(200, floor=floor)
    assert set(levels) == {floor, *HIGHER[floor]}
    assert set(levels[150:]) == {16}
    assert set(Steps(fast_link).run(200, floor=floor)) <= {floor, *HIGHER[floor]}
    assert set(Steps(alike).run(5, floor=32)) == {32}


def test_a_new_level_of_the_controller_holds_at_once_and_is_tried():
    steps = Steps(fast_link)
    steps.run(200)
    assert steps.run(3, floor=8)[:2] == [8, 8]
    assert set(steps.run(100, floor=8)[60:]) == {32}
    assert set(steps.run(2, floor=2)) == {2}


def test_a_hopeless_level_costs_two_steps_and_what_takes_longer_still_none():
    """Of 32 bits it is certain only where transfer alone takes as long."""
    levels = Steps(slow_link).run(500)
    assert Counter(levels) == {4: 498, 8: 2}
    levels = Counter(Steps(lambda bits: 0.9 if bits == 32 else 0.88 + 0.03 * bits).run(200))
    assert levels[8] == 6 and levels[16] == 0 and levels[32] > 100, "32 may take less than 8"


def test_a_trial_costs_a_hundredth_of_the_steps():
    steps = Steps(fast_link)
    levels = steps.run(20_000)
    assert sum(level != 32 for level in levels) < 0.01 * len(levels) + 100
    assert set(levels[10_000:]) == {4, 8, 32}, "but is made now and then"


BEST = {fast_link: 32, slow_link: 4, medium_link: 8}
CHANGES = [(fast_link, slow_link), (slow_link, fast_link), (slow_link, medium_link)]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_steps_that_become_longer_or_shorter_bring_a_trial(before, after):
    steps = Steps(before, noise=0.1)
    assert set(steps.run(200)[-20:]) == {BEST[before]}
    steps.seconds = after
    assert set(steps.run(80)[-5:]) == {BEST[after]}


@pytest.mark.parametrize("part", [300, 600])
def test_on_a_link_that_changes_it_is_as_fast_as_the_best_level_of_each_part(part):
    """Within 7 %; and every constant level takes much longer, or has fewer bits where they cost nothing."""
    links = [fast_link, slow_link, medium_link] * 4
    steps, levels = Steps(links[0], noise=0.05), []
    for link in links:
        steps.seconds = link
        levels += steps.run(part)
    ideal = sum(part * 1.025 * min(map(link, (4, 8, 16, 32))) for link in links)
    assert steps.spent < 1.07 * ideal
    for constant in (8, 16, 32):
        assert sum(part * 1.025 * link(constant) for link in links) > 1.2 * ideal
    assert sum(levels) / len(levels) > 2.5 * 4


def test_steps_that_merely_vary_bring_ever_fewer_trials():
    """A link between two rates, from one spell to the next, that makes no level better than another."""
    steps, trials = Steps(slow_link), []
    for spell in range(100):
        steps.seconds = [slow_link, lambda bits: 2 * slow_link(bits)][spell % 2]
        trials.append(sum(level != 4 for level in steps.run(40)))
    assert sum(trials[:10]) > sum(trials[-50:])


def test_what_happens_between_epochs_does_not_count():
    steps = Steps(medium_link)
    for epoch in range(10):  # every epoch ends with a long evaluation
        levels = steps.run(30, epoch=epoch)
        steps.now += 1000.0
    assert set(levels) == {8}
    assert set(Steps(medium_link).run(1)) == {4}
    steps = Steps(medium_link)
    for epoch in range(100):  # nothing can be measured
        assert set(steps.run(1, epoch=epoch)) <= {4, 8}
        steps.now += 1000.0


def test_a_clock_that_moves_now_and_then_only():
    steps = Steps(lambda bits: 0.0)
    for _ in range(10):
        steps.run(20)
        steps.latest = steps.ranks[0].bits
        steps.now += 0.015
    rank = AutoLevel()
    assert {rank.next_level(4, 0, 1.0, leads=True) for _ in range(50)} == {4}


@pytest.mark.parametrize("slow", range(10, 40))
def test_one_slow_step_decides_nothing(slow):
    steps = Steps(alike)
    steps.run(slow)
    steps.now += 0.4
    assert set(steps.run(200)[100:]) == {32}
    steps.now += 1000.0
    assert set(steps.run(50)) == {32}


def test_one_rank_or_all_load_a_state_in_the_middle_of_a_trial():
    """The ranks stay together, and the trial begins anew."""
    for loading in ([0], [1], [0, 1]):
        steps = Steps(fast_link)
        levels = steps.run(13)
        state = [rank.state_dict() for rank in steps.ranks]
        assert state[0] == state[1]
        for rank in loading:
            steps.ranks[rank].load_state_dict(state[rank])
        levels += steps.run(200)
        assert set(levels[100:]) == {32}


def test_a_choice_is_used_at_once_after_a_restart_and_tried():
    steps = Steps(fast_link)
    steps.run(200)
    state = steps.ranks[0].state_dict()
    assert state == {"floor": 4, "chosen": 32}
    again = Steps(slow_link)
    for rank in again.ranks:
        rank.load_state_dict(state)
    levels = again.run(100)
    assert levels[0] == 32 and set(levels[20:]) == {4}


def test_a_proposal_below_the_controllers_level_is_not_followed():
    """Rank 0 has another controller: the handshake will say so."""
    rank = AutoLevel()
    rank.next_level(8, 0, 0.0, leads=False)
    rank.learn(4)
    assert rank.next_level(8, 0, 0.0, leads=False) == 8


def test_the_log_says_what_was_found(caplog):
    caplog.set_level(logging.INFO)
    Steps(medium_link).run(100)
    assert (
        "auto level: times of a step, relative: 4 bits 1.00, 8 bits 1.00, 32 bits 3.92, 16 bits 1.98; now at 8 bits"
        in caplog.text
    )
