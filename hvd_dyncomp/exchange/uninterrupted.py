"""Work that no signal handler can interrupt: handlers wait until it is over.

Python runs signal handlers in the main thread, between any two bytecodes, and their exceptions come out there:
KeyboardInterrupt of Ctrl-C or of a notebook's stop button, an error of a DataLoader that has lost a worker. In the
middle of an exchange, this rank would be left with half a step, and the others would wait for the rest. So handlers run
when the work is over, as after Horovod's own waits, which no handler interrupts either.

Work that is cheap and may be repeated does not need this. Nor does any thread but the main one: there the work is just
done.
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
    """Do `work` to its end; return what it returns, raise what it raises.

    Raises:
        BaseException: from a signal handler, before the work begins or after it ends.
    """
    if not interruptible():
        return work()
    with Deferred():
        return work()


class Deferred:
    """Context in which signals with a Python handler are noted; the handlers run when it ends."""

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
        """Restore all handlers, even if one of them raises meanwhile; return what it raised."""
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
