"""Steps at several levels in turns, and how long they are in a program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import quantiles

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.transport.base import Transport

STEPS_PER_VISIT = 5  # of a level; the first pays for the switch and does not count
WARM_UP = 5  # first steps, which do not count: the program and torch prepare things in them


class Comparison(Controller):
    """A controller that gives the levels of steps in turns, and measures how long the steps are.

    The level of a step depends only on its number, which the quantizer's meter counts alike on all ranks, so the ranks
    need not tell each other.

    Args:
        level: of the steps that do not take part, in bits per value.
        levels: that are compared.
        steps: how many steps there are, the `WARM_UP` first ones included.
        transport: as in `Controller`.

    Attributes:
        meter: that of the quantizer; set it before the first step.
        seconds: by level, the times of its steps that count.
    """

    def __init__(
        self, level: float, levels: Sequence[float], steps: int, *, transport: Transport | None = None
    ) -> None:
        super().__init__(level, transport=transport)
        self.meter = Meter()
        self.seconds: dict[float, list[float]] = defaultdict(list)
        self._levels, self._steps = levels, steps
        self._latest: tuple[int, float] | None = None  # how many steps had ended, and when

    @property
    def bits(self) -> float:
        """Level of the next step, bits per value."""
        visit = self._visit(self._begun)
        return self._bits if visit is None else visit[0]

    @property
    def over(self) -> bool:
        """Whether all steps have been made. It is so on all ranks after the same step."""
        return self._begun >= self._steps

    @property
    def _begun(self) -> int:
        return self.meter.total().steps

    def _visit(self, number: int) -> tuple[float, int] | None:
        """The level of a step that takes part, and which step of a visit it is."""
        if not WARM_UP <= number < self._steps:
            return None
        turn, place = divmod(number - WARM_UP, STEPS_PER_VISIT)
        return self._levels[turn % len(self._levels)], place

    def on_step_end(self, now: float) -> None:
        """Note how long the steps were that have ended since the latest call, in the same place of the program.

        Args:
            now: a monotonic clock, seconds.
        """
        ended, before = self._begun, self._latest
        if before is not None and ended == before[0]:
            return  # a call without an exchange
        self._latest = (ended, now)
        visits = [self._visit(number) for number in range(before[0], ended)] if before is not None else []
        levels = {visit[0] if visit and visit[1] > 0 else None for visit in visits}
        if before is not None and len(levels) == 1 and (level := levels.pop()) is not None:
            self.seconds[level].append((now - before[1]) / len(visits))

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
