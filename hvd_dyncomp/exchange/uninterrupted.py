"""Work that no signal handler can interrupt: it is done in a thread of its own, while the main thread waits.

Python runs signal handlers in the main thread, between any two bytecodes, and what they raise comes out there:
KeyboardInterrupt of Ctrl-C or of a notebook's stop button, an error of a DataLoader that has lost a worker. In the
middle of an exchange that would leave this rank with half a step, and the others waiting for the rest. What a handler
raises meanwhile is raised when the work is over, as with Horovod's own waits, which no handler interrupts either.

What is cheap and may be repeated needs none of this, and no thread but the main one does: there the work is just done.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Result = TypeVar("Result")

_pool: ThreadPoolExecutor


def _make_pool() -> None:
    global _pool
    _pool = ThreadPoolExecutor(1, thread_name_prefix="hvd_dyncomp")


_make_pool()
os.register_at_fork(after_in_child=_make_pool)  # a process that was forked has no thread


def interruptible() -> bool:
    """Whether a signal handler may run in this thread."""
    return threading.current_thread() is threading.main_thread()


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Does `work` to its end, or does not begin it; returns what it returns, and raises what it raises.

    Raises:
        BaseException: what a signal handler has raised meanwhile, when the work is over.
    """
    if not interruptible():
        return work()
    future: Future[Result] = Future()
    try:
        _pool.submit(_do, future, work, _streams())
        return future.result()
    except BaseException:
        while not (future.done() or future.cancel()):
            with contextlib.suppress(BaseException):  # one more interruption; the first is raised
                future.exception()
        raise


def _do(future: Future[Result], work: Callable[[], Result], streams: list[torch.cuda.Stream]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        with contextlib.ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            result = work()
    except BaseException as error:  # noqa: BLE001  # raised where it was asked for
        future.set_exception(error)
    else:
        future.set_result(result)


def _streams() -> list[torch.cuda.Stream]:
    """What the other thread is to have for its current streams and, by the last, for its current device."""
    if not torch.cuda.is_initialized():
        return []
    current = torch.cuda.current_device()
    streams = [torch.cuda.current_stream(device) for device in range(torch.cuda.device_count())]
    # A default stream is the other thread's as well; and to name one would take memory on its device.
    own = [stream for stream in streams if stream != torch.cuda.default_stream(stream.device)]
    return sorted({*own, streams[current]}, key=lambda stream: stream.device.index == current)
