"""The step of a rank that cannot exchange its gradients: it tells the other ranks why."""

from __future__ import annotations

import threading

import torch

from hvd_dyncomp.exchange.handshake import handshake
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Flag, Greeting, Phase
from hvd_dyncomp.meter import Traffic
from hvd_dyncomp.transport.base import Transport, in_background

PATIENCE_SECONDS = 60.0  # for ranks that may be gone


class FailedStep:
    """Stands in for a step on a rank that cannot take part: tells the other ranks why, then raises on this one, too.

    Args:
        error: why.
        transport, label: as in `Source`.
        number, bits: as in `Step`.
        left: a step that an error has left, perhaps with messages in flight.

    Attributes:
        bits: see above.
        traffic: counts nothing.
    """

    over = False  # every request raises the error
    proposal = 0.0
    anew = False

    @torch.inference_mode(False)  # which may be the error
    def __init__(
        self, error: Exception, *, transport: Transport, label: str, number: int, bits: float, left: Step | None
    ) -> None:
        self.bits, self.traffic = bits, Traffic()
        self._error, self._left = error, left
        self._lock = threading.Lock()
        greeting = Greeting(WIRE_VERSION, Phase.HANDSHAKE, bits, 0, 0, number & 0xFFFFFFFF, Flag.FAILED, 0, 0)
        self._handshake = Task(transport, handshake(transport, label, greeting, lambda: {"error": str(error)}))
        if left is None:
            self._handshake.begin()
        in_background(transport, self._in_background)

    @property
    def refused(self) -> bool:
        """Whether all ranks know it by a handshake."""
        return isinstance(self._handshake.error, Exception)

    @torch.inference_mode(False)
    def check(self) -> None:
        """Raise the error once all ranks know it; after a minute in any case, if a step was left."""
        with self._lock:
            if self._left is not None and (not self._left.run_out(PATIENCE_SECONDS) or self._left.told):
                raise self._error
            self._handshake.begin()
            while self._left is not None and not self._handshake.done:
                if not self._handshake.wait_for(self._handshake.handle, PATIENCE_SECONDS):
                    raise self._error
                self._handshake.wait()
            try:
                self._handshake.outcome()
            except Exception as said:
                raise self._error from said
            raise self._error

    collect = check

    def _in_background(self) -> bool:
        """The others wait for this rank's error, and it may reach `check` only after them."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._left is not None and not self._left.run_out():
                return False
            return (self._left is not None and self._left.told) or self._handshake.advance()
        finally:
            self._lock.release()
