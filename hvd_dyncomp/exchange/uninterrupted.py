"""Work that no signal handler can interrupt: handlers wait until it is over.

Python runs signal handlers in the main thread, between any two bytecodes, and what they raise comes out there:
KeyboardInterrupt of Ctrl-C or of a notebook's stop button, an error of a DataLoader that has lost a worker. In the
middle of an exchange that would leave this rank with half a step, and the others waiting for the rest. So handlers are
called when the work is over, as they are after Horovod's own waits, which no handler interrupts either.

What is cheap and may be repeated needs none of this, and no thread but the main one does: there the work is just done.
"""

from __future__ import annotations

import _signal  # without the enums of `signal`, which take a microsecond for each number
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

Result = TypeVar("Result")


def interruptible() -> bool:
    """Whether a signal handler may run in this thread."""
    return threading.current_thread() is threading.main_thread()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Does `work` to its end; returns what it returns, and raises what it raises.

    Raises:
        BaseException: what a signal handler has raised; before the work has begun, or when it is over.
    """
    if not interruptible():
        return work()
    with Deferred():
        return work()


class Deferred:
    """Within it, signals that have a handler of Python's are noted; at its end, the handlers are called."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._noted: list[tuple[int, FrameType | None]] = []

    def __enter__(self) -> None:
        try:
            for number in _SIGNALS:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException:
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        raised = self._restore()
        for number, frame in self._noted:
            try:
                self._handlers[number](number, frame)
            except BaseException as one:  # noqa: BLE001  # all are called, and then the first is raised
                raised = raised or one
        if raised is not None:
            raise raised

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append((number, frame))

    def _restore(self) -> BaseException | None:
        """Puts all handlers back, whatever one of them raises meanwhile, which is returned."""
        raised = None
        while True:
            try:
                for number, handler in self._handlers.items():
                    if _signal.getsignal(number) == self._note:
                        _signal.signal(number, handler)
                return raised
            except BaseException as one:  # noqa: BLE001  # of one that is back already; the others are not yet
                raised = raised or one


_SIGNALS = sorted(map(int, signal.valid_signals()))
