"""Policies that use no metric: a constant level, and levels by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hvd_dyncomp.checks import integer, shown
from hvd_dyncomp.levels import check_level
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history


class Static(Policy):
    """The same level in every epoch.

    Args:
        bits: the level, bits per value.

    Raises:
        ValueError: `bits` is not a level.

    Examples:
        >>> Static(8).decide([])
        Decision(bits=8, reason='static')
    """

    def __init__(self, bits: float) -> None:
        self.bits = check_level("bits", bits)

    def decide(self, history: Sequence[Record]) -> Decision:
        check_history(history)
        return Decision(self.bits, "static")

    def config(self) -> dict[str, Any]:
        return {"policy": "Static", "bits": self.bits}


class Schedule(Policy):
    """Levels by epoch: each holds from its epoch until the next one listed.

    Args:
        levels: {epoch: bits per value}, with an entry for epoch 0.

    Raises:
        ValueError: `levels` is something else.

    Examples:
        >>> warm_up = Schedule({0: 32, 2: 4})
        >>> warm_up.decide([Record(epoch=0)]).bits, warm_up.decide([Record(epoch=1)]).bits
        (32, 4)
    """

    def __init__(self, levels: Mapping[int, float]) -> None:
        if not isinstance(levels, Mapping) or not levels:
            raise ValueError(f"levels must be a mapping from epochs to levels, got {shown(levels)}")
        plain = {}
        for epoch, bits in levels.items():
            epoch = integer("an epoch in levels", epoch, 0)
            plain[epoch] = check_level(f"levels[{epoch}]", bits)
        if 0 not in plain:
            raise ValueError(f"levels must have an entry for epoch 0, got {shown(levels)}")
        self.levels = dict(sorted(plain.items()))

    def decide(self, history: Sequence[Record]) -> Decision:
        history = check_history(history)
        epoch = history[-1].epoch + 1 if history else 0
        since = max(start for start in self.levels if start <= epoch)
        return Decision(self.levels[since], f"scheduled from epoch {since}")

    def config(self) -> dict[str, Any]:
        # Lists of pairs: JSON has no integer keys, and configurations are compared after a round trip.
        return {"policy": "Schedule", "levels": [list(item) for item in self.levels.items()]}
