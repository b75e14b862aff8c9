"""The level of each step: the controller's, the warm-up's at least, and with `auto_level` more if they cost nothing."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from hvd_dyncomp.auto_level import AutoLevel
from hvd_dyncomp.checks import integer
from hvd_dyncomp.levels import UNCOMPRESSED, check_level

logger = logging.getLogger(__name__)


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
        proposal: the level that rank 0 proposes for the next step; 0 on other ranks, or for none.
        epoch: of the step.
    """

    number: int
    bits: float
    proposal: float
    epoch: int


class StepLevels:
    """The levels of the steps of one quantizer.

    Args:
        source: the controller.
        warmup_steps: number of first steps that have at least `warmup_bits`.
        warmup_bits: least level of these steps.
        auto_level: whether levels above the demanded one are tried.

    Attributes:
        steps: number of steps begun.

    Raises:
        ValueError: an argument is out of range; the message names it.
    """

    def __init__(self, source: LevelSource, *, warmup_steps: int, warmup_bits: float, auto_level: bool) -> None:
        self._source = source
        self._warmup_steps = integer("warmup_steps", warmup_steps, 0)
        self._warmup_bits = check_level("warmup_bits", warmup_bits)
        self._auto = AutoLevel() if auto_level else None
        self.steps = 0

    def follow(self, levels: AutoLevel) -> None:
        """Have an object of this kind give the levels, as with `auto_level`."""
        self._auto = levels

    @property
    def bits(self) -> float:
        """See `DynamicQuantizer.bits`."""
        return self.demanded if self._auto is None or self._auto.bits is None else self._auto.bits

    @property
    def demanded(self) -> float:
        """The least level of the next step, the same on all ranks."""
        bits = self._source.bits
        return max(bits, self._warmup_bits) if self.steps < self._warmup_steps else bits

    def next(self, *, rank: int, alone: bool) -> StepConfig:
        """Begin a step.

        Args:
            rank: whose steps these are.
            alone: whether there are no other ranks.
        """
        number, epoch = self.steps, self._source.epoch
        bits = UNCOMPRESSED if alone else self.demanded
        proposal: float = 0
        if self._auto is not None:
            bits = self._auto.next_level(bits, epoch, time.monotonic(), leads=rank == 0)
            proposal = self._auto.proposal
        self.steps += 1
        return StepConfig(number, bits, proposal, epoch)

    def learn(self, proposal: float) -> None:
        """Take over what rank 0 proposed in the handshake of a finished step."""
        if self._auto is not None:
            self._auto.learn(proposal)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"steps": self.steps, "auto_level": self._auto and self._auto.state_dict()}

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Check that `load_state_dict` can use a quantizer's state.

        Raises:
            KeyError, TypeError, ValueError: it cannot.
        """
        integer("steps", state["steps"], 0)
        if state.get("auto_level") is not None:
            AutoLevel().load_state_dict(state["auto_level"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned; raises what `check` does, and nothing has changed then."""
        self.check(state)
        self.steps = integer("steps", state["steps"], 0)
        if self._auto is not None and state.get("auto_level") is not None:
            self._auto.load_state_dict(state["auto_level"])
