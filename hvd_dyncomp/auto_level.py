"""The fastest level, found by trying."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from statistics import median
from typing import Any

from hvd_dyncomp.checks import integer, shown
from hvd_dyncomp.levels import UNCOMPRESSED, check_level

logger = logging.getLogger(__name__)

# Levels above the controller's that are tried. The others lie between two of these, in time as well.
TRIED = (2, 4, 8, 16, UNCOMPRESSED)
VISITS = 5  # of each level in turn: a slow phase of the machine then affects all levels alike
STEPS_PER_VISIT = 2  # the first pays for the switch (residuals are flushed, memory is allocated) and does not count
REPROBE_EPOCHS = 5  # after which a choice is tried again
MARGIN = 0.03  # a level with more bits must be faster by this fraction; less is noise


class AutoLevel:
    """Find the level with the shortest steps, so that no compression is used that costs more time than it saves.

    The controller's level is the least that quality allows. It is tried against levels above it, 32 bits included, for
    a few steps each. The fastest is used until the controller moves or some epochs have passed. What counts is the time
    from one step to the next as a user feels it, on rank 0: the workers wait for each other in every step anyway.

    It adds no collective. The schedule of a trial follows from the number of steps, which is the same on all ranks, and
    rank 0's proposal is part of the handshake that every step has (`hvd_dyncomp.exchange.handshake`). All ranks make
    the same calls with the same arguments, except `now`.

    Attributes:
        bits: level of the step begun last; None before the first.
        verdict: the fastest level that this rank has measured, for the handshake of the step just begun; 0 for none.
    """

    def __init__(self) -> None:
        self._floor: float = UNCOMPRESSED
        self._chosen: float | None = UNCOMPRESSED
        self._since = 0
        self.bits: float | None = None
        self._restart()

    def _restart(self) -> None:
        self._schedule: list[float] = []
        self._next = 0
        self._times: dict[float, list[float]] = {}
        self._last: tuple[int, float] | None = None  # epoch and time of the step before this one
        self.verdict: float = 0

    def next_level(self, floor: float, epoch: int, now: float) -> float:
        """Fix the level of a step that begins, and return it.

        Args:
            floor: the controller's level.
            epoch: the epoch of the step.
            now: a monotonic clock, seconds.
        """
        self.bits = self._level(floor, epoch, now)
        return self.bits

    def _level(self, floor: float, epoch: int, now: float) -> float:
        if floor == UNCOMPRESSED:
            return UNCOMPRESSED
        if floor != self._floor or (self._chosen and epoch - self._since >= REPROBE_EPOCHS):
            self._restart()
            self._floor, self._chosen, self._since = floor, None, epoch
            levels = [floor, *(level for level in TRIED if level > floor)]
            self._schedule = [level for level in levels for _ in range(STEPS_PER_VISIT)] * VISITS
        if self._chosen:
            return self._chosen
        self._note(epoch, now)
        if self._next < len(self._schedule):
            self._next += 1
            return self._schedule[self._next - 1]
        self.verdict = self._fastest()
        return floor

    def _note(self, epoch: int, now: float) -> None:
        """Record the time since the last step under that step's level. Not across epochs: other work lies between."""
        index = self._next - 1
        if self._last and self._last[0] == epoch and index >= 0 and index % STEPS_PER_VISIT == STEPS_PER_VISIT - 1:
            self._times.setdefault(self._schedule[index], []).append(now - self._last[1])
        self._last = (epoch, now)

    def _fastest(self) -> float:
        seconds = {level: median(times) for level, times in self._times.items()}
        limit = seconds.get(self._floor, float("inf")) * (1 - MARGIN)
        faster = [level for level, time in seconds.items() if time < limit]
        return min(faster, key=seconds.__getitem__) if faster else self._floor

    def learn(self, proposal: float) -> None:
        """Take over rank 0's verdict, from the handshake of a finished step. 0 changes nothing.

        Nor does a verdict of a trial that a loaded state ended during that step.

        Raises:
            ValueError: this rank has not tried that level.
        """
        if not proposal or self._chosen or not self._schedule:
            return
        if proposal not in self._schedule:
            raise ValueError(
                f"rank 0 chose the level {proposal}, which this rank has not tried (it tried {set(self._schedule)}); "
                "make the same controller on every rank"
            )
        figures = ", ".join(f"{level} bits {1e3 * median(times):.1f} ms" for level, times in self._times.items())
        logger.info("auto level: time per step: %s; now at %s bits", figures, proposal)
        self._chosen = proposal
        self._restart()

    def state_dict(self) -> dict[str, Any]:
        """Plain data. A trial in progress starts anew after loading."""
        return {"floor": self._floor, "chosen": self._chosen, "since": self._since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            ValueError: `state` is something else; nothing has changed.
        """
        try:
            floor, chosen = check_level("floor", state["floor"]), state["chosen"]
            chosen = None if chosen is None else check_level("chosen", chosen)
            since = integer("since", state["since"], 0)
        except Exception as error:  # a file may contain anything
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"auto_level must come from a state_dict(), got {shown(state)}: {cause}") from error
        self._restart()
        self._floor, self._chosen, self._since = floor, chosen, since
        if self._chosen is None:
            self._floor = UNCOMPRESSED  # no trial was finished: any level of the controller's starts one
