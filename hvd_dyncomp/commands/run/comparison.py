"""Steps at several levels in turns, and how long they are in a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import quantiles

from hvd_dyncomp.levels import UNCOMPRESSED

STEPS_PER_VISIT = 5  # of a level; the first pays for the switch and does not count
WARM_UP = 5  # first steps, which do not count: the program and torch prepare things in them


class Comparison:
    """Gives the levels of steps in turns, and measures the time from one step to the next.

    The level depends on the number of the step only, so all ranks have the same one.

    Args:
        levels: that are compared.
        steps: how many take part; from then on the controller's level counts.
        tell: on rank 0 it gets the table when all have been made.

    Attributes:
        bits: the level of the step begun last; None before the first.
        seconds: by level, the times of its steps that count.
        over: whether all steps have been made.
    """

    def __init__(self, levels: Sequence[float], steps: int, tell: Callable[[str], None]) -> None:
        self.bits: float | None = None
        self._levels, self._count, self._tell = levels, steps, tell
        self._number = 0  # of the next step
        self._latest: tuple[float, bool, float] | None = None  # level of a step, whether it counts, when it began
        self.seconds: dict[float, list[float]] = defaultdict(list)

    @property
    def over(self) -> bool:
        return self._number > self._count  # the time of the last one is known when another begins

    def next_level(self, floor: float, epoch: int, now: float, *, leads: bool) -> float:
        """Fix the level of a step that begins, and return it.

        Args:
            floor: the controller's level.
            epoch: of the step.
            now: a monotonic clock, seconds.
            leads: whether this is rank 0.
        """
        if self._latest is not None:
            level, counts, began = self._latest
            if counts:
                self.seconds[level].append(now - began)
        turn, place = divmod(self._number - WARM_UP, STEPS_PER_VISIT)
        compares = WARM_UP <= self._number < self._count
        self.bits = self._levels[turn % len(self._levels)] if compares else floor
        self._latest = (self.bits, compares and place > 0, now)
        self._number += 1
        if leads and self._number == self._count + 1:
            self._tell(self.table())
        return self.bits

    def table(self) -> str:
        """What was measured, a line for each level."""
        reference = self._quartiles(UNCOMPRESSED)
        lines = ["ms from one step to the next:", "    bits    median    quartiles         steps   of 32 bits'"]
        for level in self._levels:
            low, middle, high = self._quartiles(level) or (0.0, 0.0, 0.0)
            count = len(self.seconds[level])
            share = f"{middle / reference[1]:11.2f}" if reference and count else ""
            times = f"{middle:10.2f}{f'{low:.2f} to {high:.2f}':>20}" if count else f"{'-':>10}{'-':>20}"
            lines.append(f"{level:8g}{times}{count:7}{share}".rstrip())
        return "\n".join(lines)

    def _quartiles(self, level: float) -> tuple[float, float, float] | None:
        seconds = self.seconds[level]
        if not seconds:
            return None
        low, middle, high = quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else seconds * 3
        return 1000 * low, 1000 * middle, 1000 * high
