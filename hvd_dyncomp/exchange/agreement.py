"""Agreement of all ranks on a step: before it, nothing is sent that fits only if all ranks do the same."""

from __future__ import annotations

import contextlib
from typing import Protocol

from hvd_dyncomp.exchange.handshake import flags_of, handshake
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.wire import GREETING_BYTES, WIRE_VERSION, Flag, Greeting, Phase, checksum
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.ranges import marked
from hvd_dyncomp.step_levels import Turn


class Drains(Protocol):
    """A step that was given up."""

    def drained(self, *, wait: bool = False) -> bool:
        """Whether nothing of it is in flight; `wait`: block until then."""


class Agreement:
    """The agreement on one step.

    Args:
        plan: the buckets of the step.
        turn: number, level and epoch of the step.
        fresh: whether backward has run on this rank since the last exchange.
        previous: a step that was given up: no greeting goes out while anything of it is in flight.

    Attributes:
        reached: whether all ranks are known to do the same.
        error: why this rank cannot, although they do.
        fresh: whether backward has run on any rank; False until that is known.
        proposal: rank 0's proposed level, once agreement is reached.
        nbytes: bytes that the handshake reduces.
    """

    def __init__(self, plan: Plan, turn: Turn, *, fresh: bool, previous: Drains | None) -> None:
        self._plan, self._bits, self._previous = plan, turn.bits, previous
        self.reached = self.fresh = False
        self.proposal: float = 0
        self.nbytes = GREETING_BYTES * plan.transport.size
        self.error: Exception | None = None
        greeting = Greeting(
            WIRE_VERSION,
            Phase.HANDSHAKE,
            turn.bits,
            turn.proposal if plan.source.rank == 0 else 0,
            plan.composition,
            turn.number & 0xFFFFFFFF,
            Flag.FRESH if fresh else Flag(0),
            checksum(plan.transport.host),
            plan.topology_checksum,
        )
        work = handshake(plan.transport, plan.source.label, greeting, lambda: plan.about(turn.bits, turn.number))
        self._handshake = Task(plan.transport, work)
        self._greeted = False
        self._origins = {bucket.streams: bucket.streams.origin() for bucket in plan.buckets}
        if turn.bits != UNCOMPRESSED:
            self._arrange()

    @property
    def ready(self) -> bool:
        """Whether `advance` would do something."""
        return not self.reached and self._handshake.ready

    @property
    def failed(self) -> bool:
        """Whether it will never be reached, and nothing of it is in flight."""
        return not self.reached and self._handshake.done

    def greet(self, *, wait: bool) -> bool:
        """Send the greeting once nothing of a given-up step is in flight; return whether it is sent."""
        if self._previous is not None and self._previous.drained(wait=wait):
            self._previous = None
        if self._previous is None:
            self._handshake.begin()
            self._greeted = True
        return self._greeted

    def advance(self) -> bool:
        """Do what is possible without blocking; return whether agreement is reached. Errors are kept for `reach`."""
        if self.greet(wait=False) and self._handshake.advance() and self._handshake.error is None:
            self._settle()
        return self.reached

    @marked("agree")
    def reach(self) -> None:
        """Block until all ranks agree.

        Raises:
            LockstepError: the ranks differ in level, step, parameters or settings.
            ValueError: a message would be too long.
        """
        self.greet(wait=True)
        self._handshake.outcome()
        self._settle()
        if self.error is not None:
            raise self.error

    def _settle(self) -> None:
        """All ranks agree: arrange the buckets, once. An error is kept, because a hook must not raise."""
        if self.reached or self.error is not None:
            return
        greetings = self._handshake.outcome()
        self.fresh, self.proposal = bool(flags_of(greetings) & Flag.FRESH), greetings[0].proposal
        try:
            self._plan.locate(greetings)
            if self._bits != UNCOMPRESSED:  # otherwise, residuals are on their way out
                self._arrange()
                self._plan.check_lengths(self._bits)
            self.reached = True
        except Exception as error:  # noqa: BLE001  # raised by `reach`
            self.error = error

    def _arrange(self) -> None:
        if self._plan.arranged == self._plan.topology:  # in all steps but one; nothing may wait for the streams then
            return
        with contextlib.ExitStack() as stack:
            for streams, origin in self._origins.items():  # as the messages that come after it
                stack.enter_context(streams.outgoing([origin]))
            self._plan.arrange()
