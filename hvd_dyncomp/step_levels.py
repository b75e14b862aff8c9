"""The level of each step: the controller's, and in a warm-up at least the warm-up's; before 32 bits a step at 16."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from hvd_dyncomp.checks import integer
from hvd_dyncomp.levels import UNCOMPRESSED, check_level

logger = logging.getLogger(__name__)

# Of the first step after a rise to 32 bits, which delivers what waits in residuals. It leaves 2^-16 of a block's
# largest value, which is dropped.
DELIVERY_BITS = 16


class LevelSource(Protocol):
    """Gives the number of bits: a `Controller`."""

    @property
    def bits(self) -> float:
        """The level from the next step on, bits per value."""

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""


class StepConfig(NamedTuple):
    """What is fixed about a step when it begins.

    Attributes:
        number: of the step, the same on all ranks.
        bits: its level.
        epoch: of the step.
        delivers: whether it is the first one after a rise to 32 bits. Its residuals are dropped when it has ended.
    """

    number: int
    bits: float
    epoch: int
    delivers: bool = False

    def with_residuals(self, waiting: bool) -> StepConfig:
        """The same for a step with residuals, if there are any; `waiting` must be the same on all ranks."""
        bits = with_residuals(self.bits, waiting)
        return self._replace(bits=bits, delivers=bits != self.bits)


def with_residuals(bits: float, waiting: bool) -> float:
    """The level of a step that has a level of `bits`, if residuals are waiting or not."""
    return DELIVERY_BITS if waiting and bits == UNCOMPRESSED else bits


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

    def __init__(self, source: LevelSource, *, warmup_steps: int, warmup_bits: float) -> None:
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

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Check that `load_state_dict` can use a quantizer's state.

        Raises:
            KeyError, TypeError, ValueError: it cannot.
        """
        integer("steps", state["steps"], 0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; raises what `check` does, and nothing has changed then."""
        self.check(state)
        self.steps = integer("steps", state["steps"], 0)
