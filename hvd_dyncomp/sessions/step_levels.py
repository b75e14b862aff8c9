"""The level of each step: the controller's, and in a warm-up at least the warm-up's; before 32 bits a step at 16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hvd_dyncomp.checks import integer
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange.settings import StepConfig
from hvd_dyncomp.levels import UNCOMPRESSED, check_level


class StepLevels:
    """The levels of the steps of one quantizer.

    Args:
        source: the controller.
        warmup_steps: number of first steps that have at least `warmup_bits`.
        warmup_bits: least level of these steps.

    Attributes:
        steps: number of steps begun.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, source: Controller, *, warmup_steps: int, warmup_bits: float) -> None:
        self._source = source
        self._warmup_steps = integer("warmup_steps", warmup_steps, 0)
        self._warmup_bits = check_level("warmup_bits", warmup_bits)
        self.steps = 0

    @property
    def bits(self) -> float:
        """Level of the next step, the same on all ranks, if no residuals have to be delivered."""
        bits = self._source.bits
        return max(bits, self._warmup_bits) if self.steps < self._warmup_steps else bits

    def next(self, *, alone: bool, waiting: bool) -> StepConfig:
        """Begin a step.

        Args:
            alone: whether there are no other ranks.
            waiting: whether residuals wait to be delivered.
        """
        config = StepConfig(self.steps, UNCOMPRESSED if alone else self.bits, self._source.epoch)
        self.steps += 1
        return config if alone else config.with_residuals(waiting)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned."""
        self.steps = integer("steps", state["steps"], 0)
