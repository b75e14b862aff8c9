"""The step of a rank that cannot take part: it sends the other ranks the reason."""

from __future__ import annotations

import threading

import torch

from hvd_dyncomp.exchange.handshake import NothingBegun, handshake
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Flag, Greeting, Phase
from hvd_dyncomp.meter import Traffic
from hvd_dyncomp.transport.base import Transport, in_background


class FailedStep:
    """Replaces the step on a rank that cannot take part: sends the reason to the other ranks, then raises it here, too.

    Args:
        error: the reason.
        transport, label: as in `Source`.
        number, bits: as in `Step`.

    Attributes:
        number, bits: see above.
        traffic: counts nothing.
        unanimous: whether no rank can take part: nothing has changed then, and all ranks may go on. Valid after
            `await_agreement`.
    """

    over = False  # every call raises the error
    first_of_plan = False

    @torch.inference_mode(False)  # inference mode may be the error
    def __init__(self, error: Exception, *, transport: Transport, label: str, number: int, bits: float) -> None:
        self.number, self.bits, self.traffic, self.unanimous = number, bits, Traffic(), False
        self._error = error
        self._lock = threading.Lock()
        greeting = Greeting(WIRE_VERSION, Phase.HANDSHAKE, bits, 0, number & 0xFFFFFFFF, Flag.FAILED, 0, 0)
        self._handshake = Task(transport, handshake(transport, label, greeting, lambda: {"error": str(error)}))
        self._handshake.proceed()
        in_background(transport, self._in_background)

    @property
    def refused(self) -> bool:
        """Whether all ranks know the reason. An interrupt may come before."""
        return self._handshake.done

    @torch.inference_mode(False)
    def await_agreement(self) -> None:
        """Raise the error once all ranks know it."""
        with self._lock:
            try:
                self._handshake.outcome()
            except Exception as said:
                self.unanimous = isinstance(said, NothingBegun)
                raise self._error from said
            raise self._error

    collect = await_agreement

    def abandon(self) -> None:
        """As in `Step`."""

    def _in_background(self) -> bool:
        """The other ranks wait for this rank's error, perhaps long before the program here calls `await_agreement`."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._handshake.advance()
        finally:
            self._lock.release()
