"""Which level a quantizer settles on, given how long steps take; no workers needed."""

import pytest

from hvd_dyncomp import auto_level
from hvd_dyncomp.auto_level import AutoLevel


class Steps:
    """Steps of two ranks whose duration depends on the level alone; rank 0's verdicts reach both."""

    def __init__(self, seconds):
        self.seconds, self.now, self.ranks = seconds, 0.0, [AutoLevel() for _ in range(2)]

    def run(self, count, floor=4, epoch=0):
        levels = []
        for _ in range(count):
            # Rank 1 has another clock, and sees nothing but noise.
            levels.append(self.ranks[0].next_level(floor, epoch, self.now))
            assert self.ranks[1].next_level(floor, epoch, 0.0) == levels[-1], "ranks differ"
            self.now += self.seconds(levels[-1])
            verdict = self.ranks[0].verdict
            for rank in self.ranks:
                rank.learn(verdict)
        return levels


def wire_bound(bits):
    return 1.0 + bits


def compute_bound(bits):
    return 1.0 if bits == 32 else 1.2


def hardly_faster(bits):
    return 0.99 if bits == 32 else 1.0


def alike(bits):
    return 1.0


@pytest.mark.parametrize(("seconds", "fastest"), [(wire_bound, 4), (compute_bound, 32), (alike, 4), (hardly_faster, 4)])
def test_the_fastest_level_that_quality_allows(seconds, fastest):
    levels = Steps(seconds).run(100)
    assert set(levels[:41]) == {4, 8, 16, 32}
    assert set(levels[41:]) == {fastest}


def test_never_below_the_controllers_level():
    steps = Steps(wire_bound)
    steps.run(100, floor=2)
    assert min(steps.run(100, floor=8)) == 8
    assert set(steps.run(5, floor=32)) == {32}


def test_a_new_level_and_some_epochs_bring_a_new_trial():
    steps = Steps(compute_bound)
    steps.run(100, epoch=0)
    assert set(steps.run(10, epoch=4)) == {32}
    assert set(steps.run(10, epoch=5)) == {4, 8, 16, 32}
    steps.run(100, epoch=5)
    assert set(steps.run(10, epoch=6)) == {32}
    assert set(steps.run(10, floor=8, epoch=6)) == {8, 16, 32}


def test_what_happens_between_epochs_does_not_count(monkeypatch):
    steps = Steps(wire_bound)
    for epoch in range(6):  # every epoch ends with a long evaluation, always after the same level
        steps.run(8, epoch=epoch)
        steps.now += 1000.0
    assert set(steps.run(10, epoch=6, floor=4)) == {4, 8, 16, 32}, "tried again after five epochs"
    monkeypatch.setattr(auto_level, "REPROBE_EPOCHS", 100)
    steps = Steps(wire_bound)
    for epoch in range(8):
        steps.run(8, epoch=epoch)
        steps.now += 1000.0
    assert set(steps.run(10, epoch=8)) == {4}


def test_neither_switches_nor_evaluations_nor_a_slow_spell_count():
    """All of them fall on the level that is fastest."""
    steps, before = Steps(compute_bound), [0]

    def seconds(bits):
        switched, before[0] = bits != before[0], bits
        return compute_bound(bits) + 10 * (switched and bits == 32)

    steps.seconds = seconds
    assert set(steps.run(60)[41:]) == {32}

    steps = Steps(compute_bound)
    for epoch in range(3):  # three of the five visits of 32 bits are the last steps of an epoch
        steps.run(8, epoch=epoch)
        steps.now += 1000.0
    assert set(steps.run(60, epoch=3)[20:]) == {32}

    steps = Steps(compute_bound)
    steps.run(8)
    steps.now += 1000.0  # within an epoch, once
    assert set(steps.run(60)[40:]) == {32}


def test_a_verdict_of_a_trial_that_a_loaded_state_has_ended_changes_nothing():
    """The state is loaded between backward and step, in the step whose handshake brings the verdict."""
    steps = Steps(compute_bound)
    before = steps.ranks[0].state_dict()
    steps.run(10)
    for rank in steps.ranks:
        rank.load_state_dict(before)
        rank.learn(32)
    assert set(steps.run(41)) == {4, 8, 16, 32}, "it is tried anew"
    assert set(steps.run(10)) == {32}


def test_a_choice_survives_a_restart_and_an_unfinished_trial_does_not():
    steps = Steps(compute_bound)
    steps.run(100)
    again = AutoLevel()
    again.load_state_dict(steps.ranks[0].state_dict())
    assert again.next_level(4, 1, 0.0) == 32
    steps = Steps(compute_bound)
    steps.run(10)
    again.load_state_dict(steps.ranks[0].state_dict())
    assert [again.next_level(4, 0, 0.0) for _ in range(4)] == [4, 4, 8, 8]


def test_a_choice_that_was_not_tried_is_refused():
    with pytest.raises(ValueError, match="chose the level 3"):
        rank = AutoLevel()
        rank.next_level(4, 0, 0.0)
        rank.learn(3)
