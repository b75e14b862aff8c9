"""As many bits as the link carries without making training wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_dyncomp.checks import finite, shown
from hvd_dyncomp.policies.arguments import ascending_levels, metric_name, metric_of
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history

_INSTEAD = (("wait", "LinkAware(monitor={!r})"), ("", "controller.step({{'waited': quantizer.meter.waited(), ...}})"))
_TRY = 0.15  # of an epoch: no level is tried that would take longer by more, if all waiting came from the link
_PAUSE, _LONGEST_PAUSE = 2, 16  # epochs at a level before the next one is tried; doubled by each move that was in vain


class LinkAware(Policy):
    """More bits where training hardly waits for exchanges, fewer where it waits much: for links whose rate changes.

    After each epoch pass the share of its time for which this rank was blocked by exchanges:

        controller.step({"waited": quantizer.meter.waited()})

    The least share of all ranks counts: ranks that wait for a slow rank do not show that the link is slow.

    - The first epoch has the middle level; of an even number, the upper one.
    - If the share exceeds `most`, the level falls at once, as far as is necessary if all waiting came from the link.
    - After two epochs at a level, the next higher one is tried for an epoch, unless it is known to cost too much.
    - A move that was in vain is taken back: a rise after which training waits too much; or a fall after which it waits
      as long as before, so that the waiting comes from steps of unequal length, which is then left out of account. The
      level then stays for twice as many epochs as before the move, at most 16, or until the link is a better one.

    So an epoch on a link that has just become slow still has the bits of before. Use it where the rate of the link is
    not known beforehand, or changes between epochs; where it is constant, `python -m hvd_dyncomp probe` names a level.

    Args:
        levels: two or more ascending levels, bits per value; the last may be 32, uncompressed. With 2 bits or fewer,
            see `less_momentum`.
        most: the share of an epoch's time that may be spent waiting, more than 0 and less than 1.
        monitor: name of the metric with the share, from 0 to 1.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; the message names it and its value.

    Examples:
        >>> policy = LinkAware(levels=(2, 4, 8, 16))
        >>> policy.decide([]).bits
        8
        >>> policy.decide([Record(0, {"waited": 0.12})])
        Decision(bits=2, reason='waited 0.12 exceeds 0.05')
        >>> policy.decide([Record(0, {"waited": 0.01}), Record(1, {"waited": 0.01})])
        Decision(bits=16, reason='waited 0.01: tries more bits')
    """

    def __init__(
        self, levels: Sequence[float] = (2, 4, 8, 16, 32), *, most: float = 0.05, monitor: str = "waited"
    ) -> None:
        self.levels = ascending_levels(levels)
        if len(self.levels) < 2:
            raise ValueError(f"levels must be two or more, got {shown(levels)}")
        self.most = finite("most", most)
        if not 0 < self.most < 1:
            raise ValueError(f"most must be more than 0 and less than 1, got {shown(most)}")
        self.monitor = metric_name("monitor", monitor)

    @property
    def least(self) -> tuple[str, ...]:
        return (self.monitor,)

    def config(self) -> dict[str, Any]:
        return {"policy": "LinkAware", **vars(self), "levels": list(self.levels)}

    def decide(self, history: Sequence[Record]) -> Decision:
        state = _State(len(self.levels) // 2)
        reason = "start"
        for record in check_history(history):
            share = metric_of(record, self.monitor, self, _INSTEAD)
            if not 0 <= share <= 1:
                raise ValueError(f"metrics[{self.monitor!r}] must be a share from 0 to 1, got {share}")
            reason = f"{self.monitor} {share:.2g}{self._after(state, share)}"
        return Decision(self.levels[state.place], reason)

    def _after(self, state: _State, share: float) -> str:
        """Replay one epoch: move `state`; return why, to follow the share."""
        waited, most, before = _of_computing(share), _of_computing(self.most), state.before
        bits, above = self.levels[state.place], state.place + 1
        depends = before is not None and self._depends(before, (state.place, waited))
        changed = before is not None and before[0] > state.place and waited > 2 * before[1]  # the link, meanwhile
        state.other = min(state.other, waited) if before is None else 0.0 if depends or changed else waited
        excess = waited - state.other
        state.epochs, state.before = state.epochs + 1, None
        if before is not None:
            if before[0] < state.place and excess > most:
                state.take_back(before[0])
                state.tried_at = before[1]
                return f" exceeds {self.most:g}: takes the rise back"
            if before[0] > state.place and not depends and not changed:
                state.take_back(before[0], keeps=True)
                return ", as with more bits: takes the fall back"
            state.pause = _PAUSE
        if waited <= most < state.tried_at / 2:  # the link is another one than in the latest try
            state.pause, state.tried_at = _PAUSE, 0.0
        if excess > most and state.place and state.epochs > state.kept:
            fit = [place for place in range(state.place) if excess * self.levels[place] / bits <= most]
            state.move(max(fit, default=0), waited)
            return f" exceeds {self.most:g}"
        if state.epochs < state.pause or above == len(self.levels):
            return ": hold"
        if excess * (self.levels[above] / bits - 1) > _TRY:
            return ": hold, as more bits would take too long"
        state.move(above, waited)
        return ": tries more bits"

    def _depends(self, *epochs: tuple[int, float]) -> bool:
        """Whether waiting grows with the bits: at least half as much as if all of it came from the link."""
        (few, less), (many, more) = sorted(epochs)
        return less < more * (1 + self.levels[few] / self.levels[many]) / 2


@dataclass
class _State:
    """The state of `LinkAware` after the epochs replayed so far. Waiting is relative to the time of computing.

    Attributes:
        place: of the level.
        before: place and waiting before the latest move, until that has been judged.
        epochs: at this level, in a row.
        pause: epochs at a level before the next one is tried.
        kept: epochs at this level in which it does not fall.
        other: waiting that does not come from the link.
        tried_at: waiting before the latest rise that was taken back.
    """

    place: int
    before: tuple[int, float] | None = None
    epochs: int = 0
    pause: int = _PAUSE
    kept: int = 0
    other: float = 0.0
    tried_at: float = 0.0

    def move(self, place: int, waited: float) -> None:
        self.place, self.before, self.epochs, self.kept = place, (self.place, waited), 0, 0

    def take_back(self, place: int, *, keeps: bool = False) -> None:
        self.place, self.epochs, self.pause = place, 0, min(2 * self.pause, _LONGEST_PAUSE)
        self.kept = self.pause if keeps else 0


def _of_computing(share: float) -> float:
    """A share of all time as a multiple of the rest of the time."""
    return share / max(1 - share, 1e-6)
