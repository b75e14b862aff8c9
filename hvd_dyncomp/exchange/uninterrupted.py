"""Work that no signal handler can interrupt: it is done in a thread of its own, while the main thread waits.

Python runs signal handlers in the main thread, between any two bytecodes, and what they raise comes out there:
KeyboardInterrupt of Ctrl-C or of a notebook's stop button, an error of a DataLoader that has lost a worker. In the
middle of an exchange that would leave this rank with half a step, and the others waiting for the rest. What a handler
raises meanwhile is raised when the work is over, as with Horovod's own waits, which no handler interrupts either.

What is cheap and may be repeated needs none of this, and no thread but the main one does: there the work is just done.
Likewise under a profiler, which would not see another thread.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

from hvd_dyncomp.exchange.ranges import profiled

Result = TypeVar("Result")

# Locks, queue and thread are those of the interpreter: threading's and concurrent.futures' are written in Python, and
# whoever is interrupted within them may leave a lock behind.
_tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
_started = False
_here = threading.local()


def interruptible() -> bool:
    """Whether a signal handler may run in this thread."""
    return threading.current_thread() is threading.main_thread()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Does `work` to its end, or does not begin it; returns what it returns, and raises what it raises.

    Raises:
        BaseException: what a signal handler has raised meanwhile, when the work is over.
    """
    if not interruptible() or profiled():
        return work()
    task = _Task(work, _streams())
    try:
        if not _started:
            start_thread()
        _tasks.put(task)
        task.over.acquire()
    except BaseException:
        task.cancel()
        raise
    if task.error is None:
        return task.result
    try:
        raise task.error
    finally:
        del task  # whose error has this frame in its traceback


def start_thread() -> None:
    """One more thread that does such work. One is enough where there is one main thread."""
    global _started
    _thread.start_new_thread(_loop, ())
    _started = True


def _loop() -> None:
    _here.working = True
    while True:
        _tasks.get().do()


def _after_fork() -> None:
    global _started
    _started = False  # a process that was forked has no other thread


os.register_at_fork(after_in_child=_after_fork)


class _Task(Generic[Result]):
    """Work for the other thread.

    Attributes:
        over: held until it has been done.
        result, error: what it returned, or raised.
    """

    result: Any = None
    error: BaseException | None = None

    def __init__(self, work: Callable[[], Result], streams: list[torch.cuda.Stream]) -> None:
        self._work, self._streams = work, streams
        self._claimed, self.over = _thread.allocate_lock(), _thread.allocate_lock()
        self.over.acquire()
        self._done = False

    def do(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            with contextlib.ExitStack() as stack:
                for stream in self._streams:
                    stack.enter_context(torch.cuda.stream(stream))
                self.result = self._work()
        except BaseException as error:  # noqa: BLE001  # raised where it was asked for
            self.error = error
        self._done = True
        self.over.release()

    def cancel(self) -> None:
        """If it has not begun, it never will; otherwise blocks until it has been done."""
        if self._claimed.acquire(blocking=False):
            return
        while not self._done:
            with contextlib.suppress(BaseException):  # one more interruption; the first is raised
                time.sleep(1e-3)


def _streams() -> list[torch.cuda.Stream]:
    """What the other thread is to have for its current streams and, by the last, for its current device."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    streams = [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]
    # A default stream is the other thread's as well; and to name one would take memory on its device.
    own = [stream for stream in streams if stream != torch.cuda.default_stream(stream.device)]
    return sorted({*own, streams[current]}, key=lambda stream: stream.device.index == current)
