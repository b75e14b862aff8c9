"""More bits wherever they cost no time, found by trying."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Generator, Mapping
from statistics import median
from typing import Any, NamedTuple

from hvd_dyncomp.checks import comes_from
from hvd_dyncomp.levels import UNCOMPRESSED, check_level

logger = logging.getLogger(__name__)

# Levels above the controller's that are tried. The others lie between two of these, in time as well.
TRIED = (2, 4, 8, 16, UNCOMPRESSED)
VISITS = 5  # of each level, in turns with the controller's: a slow phase of the machine then affects both alike
STEPS_PER_VISIT = 2  # the first pays for the switch (residuals are flushed, memory is allocated) and does not count
MARGIN = 0.03  # steps that take longer than the shortest by no more than this are as short: less is noise
HOPELESS = (1.5, 1.25, 1.1, 1.1)  # times as long, or as short, as the controller's after each visit: no further one
REST = 100  # times as many steps as a trial has are made before the next one, so that it costs little if for nothing
DRIFT, IN_A_ROW, MOST = 1.2, 5, 3  # unless steps in a row, two to five of them, are longer, or shorter, by a fifth
REFERENCE = 10  # steps that say how long they were before
PAUSE = 20  # least number of steps between two trials; doubled after each that changes nothing

_Search = Generator[float, None, Any]  # in each step, gives the level that the next one shall have


class _Begun(NamedTuple):
    """A step that has begun: its level, its epoch, when, and whether the step before had another level."""

    level: float
    epoch: int
    at: float
    switched: bool


class AutoLevel:
    """Find, of the levels with the shortest steps, the one with the most bits: no slower than any, nothing given up.

    The controller's level is the least that quality allows. It is tried against those of `TRIED` above it, for a few
    steps each: at first, when the controller moves, when steps have become longer or shorter by a fifth, and now
    and then. What counts is the time from one step to the next as a user feels it, on rank 0: the workers wait for each
    other in every step anyway.

    It adds no collective: rank 0's proposal for the next step is part of the handshake that every step has
    (`hvd_dyncomp.exchange.handshake`).

    Attributes:
        bits: level of the step begun last; None before the first.
        proposal: on rank 0, the level that the next step shall have, for the handshake of the step just begun. 0: as
            the controller says.
    """

    def __init__(self) -> None:
        self._floor: float = UNCOMPRESSED
        self._level: float = UNCOMPRESSED
        self.bits: float | None = None
        self._restart()

    def _restart(self) -> None:
        self.proposal: float = 0
        self._search: _Search = self._forever()
        self._begun: _Begun | None = None
        self._ended: tuple[float, float] | None = None  # level and seconds of the step before, if they count

    def next_level(self, floor: float, epoch: int, now: float, *, leads: bool) -> float:
        """Fix the level of a step that begins, and return it.

        Args:
            floor: the controller's level, the same on all ranks.
            epoch: the epoch of the step.
            now: a monotonic clock, seconds.
            leads: whether this is rank 0, which measures and proposes.
        """
        if floor != self._floor:
            self._floor = self._level = floor
            self._restart()
        self.bits = self._level
        if leads and floor != UNCOMPRESSED:
            self._note(_Begun(self.bits, epoch, now, self._begun is None or self._begun.level != self.bits))
            self.proposal = next(self._search)
        return self.bits

    def _note(self, begun: _Begun) -> None:
        """The step before has ended. Its time does not count across epochs, where other work lies between, nor if a
        coarse clock has not moved.
        """
        before, self._begun = self._begun, begun
        counts = before is not None and before.epoch == begun.epoch and before.at < begun.at and not before.switched
        self._ended = (before.level, begun.at - before.at) if before and counts else None

    def _forever(self) -> _Search:
        pause, latest = PAUSE, None
        while True:
            steps, chosen = yield from self._trial()
            pause, latest = 2 * pause if chosen == latest else PAUSE, chosen
            yield from self._hold(chosen, pause, REST * steps)

    def _trial(self) -> Generator[float, None, tuple[int, float]]:
        """Try the levels above the controller's, one after the other; return the number of steps and the choice."""
        ratios, steps = {self._floor: 1.0}, 0
        above = [level for level in TRIED if level > self._floor]
        chosen = self._floor
        for level in dict.fromkeys([above[0], UNCOMPRESSED, *above]):
            if chosen == UNCOMPRESSED or self._takes_longer(level, ratios):
                continue
            visits, ratios[level] = yield from self._compare(level)
            steps += (2 * visits + 1) * STEPS_PER_VISIT
            limit = (1 + MARGIN) * min(ratios.values())
            chosen = max(level for level, ratio in ratios.items() if ratio <= limit)
        shares = ", ".join(f"{level:g} bits {ratio:.2f}" for level, ratio in ratios.items())
        logger.info("auto level: times of a step, relative: %s; now at %g bits", shares, chosen)
        return steps, chosen

    def _takes_longer(self, level: float, ratios: Mapping[float, float]) -> bool:
        """Whether a level is hopeless because one of fewer bits was."""
        worse = min((bits for bits, ratio in ratios.items() if bits < level and ratio > HOPELESS[-1]), default=None)
        if worse is None or level < UNCOMPRESSED:
            return worse is not None
        # 32 bits spare the arithmetic, but not if they alone travel that long.
        return UNCOMPRESSED * (ratios[worse] - 1) / (worse - self._floor) > HOPELESS[0]

    def _compare(self, level: float) -> Generator[float, None, tuple[int, float]]:
        """Visit a level and the controller's in turns.

        Returns:
            The number of visits, less than all if it is clear; and how many times as long the level's steps are.
        """
        seconds: dict[float, list[float]] = defaultdict(list)
        visits, ratio = 0, float("inf")
        for turn in range(2 * VISITS + 1):
            for _ in range(STEPS_PER_VISIT):
                yield level if turn % 2 else self._floor
                if self._ended:
                    seconds[self._ended[0]].append(self._ended[1])
            if turn and turn % 2 == 0:  # a step's time is known when two more have been asked for
                visits = turn // 2
                if seconds[level] and seconds[self._floor]:
                    ratio = median(seconds[level]) / median(seconds[self._floor])
                if visits < VISITS and max(ratio, 1 / ratio) > HOPELESS[visits - 1]:
                    break
        return visits, ratio

    def _hold(self, level: float, least: int, most: int) -> _Search:
        """Stay at a level, as long as its steps take what they took at first."""
        first: list[float] = []
        drifted = 0
        for step in range(most):
            yield level
            if self._ended is None or self._ended[0] != level:
                continue
            if len(first) < REFERENCE:
                first.append(self._ended[1])
                continue
            ratio = self._ended[1] / median(first)
            # A step that is off by far counts more, and one that is not ends the row.
            way = max(-MOST, min(MOST, int(math.log(ratio, DRIFT))))
            drifted = drifted + way if drifted * way > 0 else way
            if step >= least and abs(drifted) >= IN_A_ROW:
                return

    def learn(self, proposal: float) -> None:
        """Take over rank 0's proposal, from the handshake of a finished step.

        One below this rank's controller's level is not: the next handshake then tells all ranks that levels differ.
        """
        if proposal >= self._floor:
            self._level = proposal

    def state_dict(self) -> dict[str, Any]:
        """Plain data. Levels are tried anew after loading: the machine may be another."""
        return {"floor": self._floor, "chosen": self._level}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: `state` is something else; nothing has changed.
        """
        with comes_from("a state_dict()", state, "auto_level"):
            floor, chosen = check_level("floor", state["floor"]), check_level("chosen", state["chosen"])
        self._restart()
        self._floor, self._level = floor, chosen
