"""Tasks: code that waits for other ranks is a generator of collectives, and `Task` drives it."""

from __future__ import annotations

import time
from collections.abc import Generator
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from hvd_dyncomp.transport.base import Transport

Result = TypeVar("Result")


class Gate(Enum):
    """Where a generator must wait for its caller's permission.

    SEND: the first messages are ready, and nothing is sent before all ranks agree. WRITE: the means can be decoded, and
    nothing is written to memory that other code has yet to read.
    """

    SEND = "send"
    WRITE = "write"


# A generator that starts one collective after another: it yields each handle, and is sent the received tensor. It may
# also yield a gate, and is resumed when the gate is open.
Collectives = Generator[Any, Any, Result]


class Task(Generic[Result]):
    """Runs a generator of collectives, as far as it can go without waiting.

    Args:
        transport: carries the collectives.
        work: the generator.

    Attributes:
        done: whether the generator has ended.
        error: the exception that ended the generator. Stored, because a backward hook must not raise.
        collectives: number of collectives started.
        waited: seconds for which callers were blocked by collectives.
        handle: of the collective in flight, or None.
        gate: the closed gate at which the generator waits, or None.
    """

    def __init__(
        self,
        transport: Transport,
        work: Collectives[Result],
    ) -> None:
        self._transport = transport
        self._work = work
        self._begun = False
        self.handle: Any = None
        self._result: Any = None
        self.gate: Gate | None = None
        self.done = False
        self.error: Exception | None = None
        self.collectives = 0
        self.waited = 0.0

    def is_open(self, gate: Gate) -> bool:
        """Whether the generator may pass a gate; tasks with gates override it."""
        return True

    def receive(self, handle: Any) -> torch.Tensor:
        """Block until a collective is over; return the received tensor."""
        began = time.perf_counter()
        try:
            return self._transport.wait(handle)
        finally:
            self.waited += time.perf_counter() - began

    def proceed(self) -> None:
        """Run the generator to its next collective or closed gate, if nothing is in flight."""
        if not self._begun:
            self._resume(None)
        while self.gate is not None and self.is_open(self.gate):
            self._resume(None)

    def advance(self) -> bool:
        """Run as far as possible without blocking; return whether the generator has ended."""
        self.proceed()
        while not self.done and self.gate is None and self._has_arrived():
            self.wait()
        return self.done

    def wait(self) -> None:
        """Block until the collective in flight is over, then run to the next one or to a closed gate."""
        self.proceed()
        if self.done or self.gate is not None:
            return
        try:
            received = self.receive(self.handle)
        except Exception as error:  # noqa: BLE001  # raised by `outcome`
            self.done, self.error = True, error
        else:
            self._resume(received)
            self.proceed()

    def outcome(self) -> Result:
        """Block until the end; return the result, or raise the error, in every call. All gates must be open."""
        while not self.done:
            self.wait()
        self.raise_error()
        return self._result

    def raise_error(self) -> None:
        """Raise the error that ended the task: where collectives match by their order, nothing may start after it."""
        if self.error is not None:
            raise self.error

    def _has_arrived(self) -> bool:
        try:
            return self._transport.poll(self.handle)
        except Exception:  # noqa: BLE001  # `wait` raises it, too, and keeps it
            return True

    def _resume(self, received: torch.Tensor | None) -> None:
        """Continue the generator with a received tensor; with None from its beginning or a gate."""
        self.handle, self.gate, self._begun = None, None, True
        try:
            at = self._work.send(received)
        except StopIteration as end:
            self.done, self._result = True, end.value
        except Exception as error:  # noqa: BLE001  # raised by `outcome`
            self.done, self.error = True, error
        else:
            if isinstance(at, Gate):
                self.gate = at
            else:
                self.handle = at
                self.collectives += 1
