"""Tasks: whatever waits for other ranks is a generator of collectives, and one class drives all of them."""

from __future__ import annotations

from collections.abc import Generator
from enum import Enum
from typing import Any, Generic, TypeVar

import torch

from hvd_dyncomp.transport.base import Transport

Result = TypeVar("Result")


class Gate(Enum):
    """What a generator yields where it must not go on by itself.

    SEND: the first messages are ready; nothing is sent before all ranks agree. WRITE: the means are ready to be
    decoded; nothing is written into memory that somebody has yet to read.
    """

    SEND = "send"
    WRITE = "write"


# One collective after the other. Yields the handle of each collective that it starts, and is sent what was received.
# Yields a gate, and is resumed when it is open.
Collectives = Generator[Any, Any, Result]


class Task(Generic[Result]):
    """Runs a generator of collectives, as far as it can go without waiting.

    Args:
        transport: carries the collectives.
        work: the generator.

    Attributes:
        done: whether the generator has ended.
        error: why it has no result; kept, because a backward hook must not raise.
        collectives: number of collectives started.
        handle: of the collective in flight, or None.
        gate: the gate at which it waits, or None.
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

    def is_open(self, gate: Gate) -> bool:
        """Whether the generator may pass a gate. For tasks that have any."""
        return True

    def receive(self, handle: Any) -> torch.Tensor:
        """Block until a collective is over; return what it has brought."""
        return self._transport.wait(handle)

    def begin(self) -> None:
        """Go on to the next collective or closed gate, if none is in flight."""
        if not self._begun:
            self._resume(None)
        while self.gate is not None and self.is_open(self.gate):
            self._resume(None)

    def advance(self) -> bool:
        """Go on without waiting; return whether it is done."""
        self.begin()
        while not self.done and self.gate is None and self._has_arrived():
            self.wait()
        return self.done

    def wait(self) -> None:
        """Block until the collective in flight is over, and go on to the next one or to a closed gate."""
        self.begin()
        if self.done or self.gate is not None:
            return
        try:
            received = self.receive(self.handle)
        except Exception as error:  # noqa: BLE001  # raised by `outcome`
            self.done, self.error = True, error
        else:
            self._resume(received)
            self.begin()

    def outcome(self) -> Result:
        """Block to the end; return the result, or raise the error each time that somebody asks. No gate is closed."""
        while not self.done:
            self.wait()
        if self.error is not None:
            raise self.error
        return self._result

    def _has_arrived(self) -> bool:
        try:
            return self._transport.poll(self.handle)
        except Exception:  # noqa: BLE001  # `wait` raises it, too, and keeps it
            return True

    def _resume(self, received: torch.Tensor | None) -> None:
        """Continue the generator: with what was received, or from its beginning or a gate."""
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
