"""Which level each step has: the controller's, at least the warm-up's, and with `auto_level` the fastest above it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from hvd_dyncomp.auto_level import AutoLevel
from hvd_dyncomp.checks import integer
from hvd_dyncomp.levels import UNCOMPRESSED, check_level


class LevelSource(Protocol):
    """Who says at how many bits: a `Controller`."""

    @property
    def bits(self) -> float:
        """From the next step on."""

    @property
    def epoch(self) -> int:
        """That is under way."""


class Turn(NamedTuple):
    """What is fixed about a step when it begins.

    Attributes:
        number: of the step, the same on all ranks.
        bits: its level.
        proposal: this rank's, of a level for the steps after it; 0 for none.
        epoch: that it belongs to.
    """

    number: int
    bits: float
    proposal: float
    epoch: int


class StepLevels:
    """Of one quantizer.

    Args:
        source: the controller.
        warmup_steps: so many first steps have at least
        warmup_bits: this level.
        auto_level: whether levels above the one that is demanded are tried.

    Attributes:
        steps: how many have begun.

    Raises:
        ValueError: an argument is out of range; the text names it.
    """

    def __init__(self, source: LevelSource, *, warmup_steps: int, warmup_bits: float, auto_level: bool) -> None:
        self._source = source
        self._warmup_steps = integer("warmup_steps", warmup_steps, 0)
        self._warmup_bits = check_level("warmup_bits", warmup_bits)
        self._auto = AutoLevel() if auto_level else None
        self.steps = 0

    @property
    def bits(self) -> float:
        """As `DynamicQuantizer.bits`."""
        return self._demanded if self._auto is None or self._auto.bits is None else self._auto.bits

    @property
    def _demanded(self) -> float:
        """The least level of the next step, the same on all ranks."""
        bits = self._source.bits
        return max(bits, self._warmup_bits) if self.steps < self._warmup_steps else bits

    def next(self, *, alone: bool) -> Turn:
        """A step begins.

        Args:
            alone: whether there is nobody to send to.
        """
        number, epoch = self.steps, self._source.epoch
        bits = UNCOMPRESSED if alone else self._demanded
        proposal: float = 0
        if self._auto is not None:
            bits = self._auto.begin_step(bits, epoch, time.monotonic())
            proposal = self._auto.verdict
        self.steps += 1
        return Turn(number, bits, proposal, epoch)

    def learn(self, proposal: float) -> None:
        """What rank 0 has proposed in the handshake of a step that is over."""
        if self._auto is not None:
            self._auto.learn(proposal)

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"steps": self.steps, "auto_level": self._auto and self._auto.state_dict()}

    @staticmethod
    def check(state: Mapping[str, Any]) -> None:
        """Whether `load_state_dict` can take over what is in a quantizer's state.

        Raises:
            KeyError, TypeError, ValueError: it cannot.
        """
        integer("steps", state["steps"], 0)
        if state.get("auto_level"):
            AutoLevel().load_state_dict(state["auto_level"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned; raises what `check` does, and nothing has changed then."""
        self.check(state)
        self.steps = integer("steps", state["steps"], 0)
        if self._auto is not None and state.get("auto_level"):
            self._auto.load_state_dict(state["auto_level"])
