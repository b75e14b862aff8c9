"""The step of a rank that cannot exchange its gradients: it tells the other ranks why."""

from __future__ import annotations

import threading

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.handshake import handshake
from hvd_dyncomp.exchange.intake import Taken
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.uncompressed import wire_form
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Flag, Greeting, Phase
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.transport.base import Transport, in_background


class FailedStep:
    """Stands in for a step on a rank that has no plan: tells the other ranks why, then raises on this one, too.

    Args:
        error: why.
        transport, label, number, bits: as in `Step`, `OptimizerGradients` and `Plan`.
    """

    over = False  # every request raises its error

    def __init__(self, error: Exception, *, transport: Transport, label: str, number: int, bits: float) -> None:
        self._error, self._bits = error, bits
        self._lock = threading.Lock()
        greeting = Greeting(WIRE_VERSION, Phase.HANDSHAKE, bits, 0, 0, number & 0xFFFFFFFF, Flag.FAILED, 0, 0)
        self._handshake = Task(transport, handshake(transport, label, greeting, lambda: {"error": str(error)}))
        self._handshake.begin()
        in_background(transport, self._in_background)

    def take(self, gradient: torch.Tensor) -> Taken:
        """Give Horovod a tensor of the other ranks' shape, so that they get far enough to hear of the error."""
        # Except for tensors that they skip: perhaps `skip` itself has failed here.
        compressed = self._bits != UNCOMPRESSED and gradient.is_floating_point() and bool(gradient.numel())
        wire = torch.zeros(1, dtype=torch.float32, device="cpu") if compressed else wire_form(gradient)
        return Taken(wire, gradient, compressed)

    def check(self) -> None:
        """Raise the error once all ranks know it."""
        with self._lock:
            try:
                self._handshake.outcome()
            except LockstepError as said:
                raise self._error from said
            raise self._error

    collect = check

    def _in_background(self) -> bool:
        """The others wait for this rank's error, and it may reach `check` only after them."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return self._handshake.advance()
        finally:
            self._lock.release()
