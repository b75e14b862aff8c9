"""Whether all ranks do the same in a step: nothing that only fits if they do is sent before that is known."""

from __future__ import annotations

import contextlib
from typing import Protocol

from hvd_dyncomp.exchange.handshake import Handshake
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.ranges import marked
from hvd_dyncomp.exchange.step_levels import Turn
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Flag, Greeting, Phase, checksum
from hvd_dyncomp.levels import UNCOMPRESSED


class Drains(Protocol):
    """A step that was given up."""

    def drained(self, *, wait: bool = False) -> bool:
        """Whether nothing of it is under way; `wait`: block until that is so."""


class Agreement:
    """Of one step.

    Args:
        plan: what travels where.
        turn: the step's.
        fresh: whether backward has run on this rank since the last exchange.
        previous: a step that was given up: no greeting goes out while anything of it is under way.

    Attributes:
        reached: whether all ranks are known to do the same.
        error: why they do not, or why this rank cannot.
    """

    def __init__(self, plan: Plan, turn: Turn, *, fresh: bool, previous: Drains | None) -> None:
        self._plan, self._bits, self._previous = plan, turn.bits, previous
        self.reached = False
        self.error: Exception | None = None
        greeting = Greeting(
            WIRE_VERSION,
            Phase.HANDSHAKE,
            turn.bits,
            turn.proposal if plan.binding.rank == 0 else 0,
            plan.composition,
            turn.number & 0xFFFFFFFF,
            Flag.FRESH if fresh else Flag(0),
            checksum(plan.transport.host),
            plan.topology_checksum,
        )
        label = plan.binding.label
        self._handshake = Handshake(plan.transport, label, greeting, lambda: plan.about(turn.bits, turn.number))
        self._origins = {bucket.streams: bucket.streams.origin() for bucket in plan.buckets}
        if turn.bits != UNCOMPRESSED:
            self._arrange()

    @property
    def fresh(self) -> bool:
        """Whether backward has run on any rank; False before that is known."""
        return self._handshake.fresh

    @property
    def nbytes(self) -> int:
        """What is reduced for it."""
        return self._handshake.nbytes

    @property
    def proposal(self) -> float:
        """Rank 0's, when it is reached."""
        return self._handshake.greetings[0].proposal

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something."""
        return not self.reached and (not self._handshake.started or self._handshake.ready)

    @property
    def failed(self) -> bool:
        """Whether it will never be reached, and nothing of it is under way."""
        return not self.reached and (self.error is not None or self._handshake.drained)

    def greet(self, *, wait: bool) -> bool:
        """Whether the others have been greeted; does it when nothing that was given up is under way any more."""
        if self._previous is not None and self._previous.drained(wait=wait):
            self._previous = None
        if self._previous is None and not self._handshake.started:
            self._handshake.start()
        return self._handshake.started

    def advance(self) -> bool:
        """Does what is possible without blocking; returns whether it is reached. An error is kept in `error`."""
        if self.greet(wait=False) and not self.reached and self.error is None and self._handshake.agreed():
            self._settle()
        return self.reached

    @marked("agree")
    def reach(self) -> None:
        """Blocks until it is known.

        Raises:
            LockstepError: the ranks disagree about level, step, parameters or settings.
            ValueError: `hierarchical` cannot be True here, or a message would be too long.
        """
        self.greet(wait=True)
        self._handshake.check()
        if not self.reached and self.error is None:
            self._settle()
        if self.error is not None:
            raise self.error

    def _settle(self) -> None:
        """All have said the same. An error is kept, as hooks must raise none."""
        try:
            self._plan.locate(self._handshake.greetings)
            if self._bits != UNCOMPRESSED:  # otherwise, residuals are on their way out
                self._arrange()
                self._plan.check_lengths(self._bits)
            self.reached = True
        except Exception as error:  # noqa: BLE001  # raised by `reach`
            self.error = error

    def _arrange(self) -> None:
        with contextlib.ExitStack() as stack:
            for streams, origin in self._origins.items():  # as the messages that come after it
                stack.enter_context(streams.outgoing([origin]))
            self._plan.arrange()
