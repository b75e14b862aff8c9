"""Work in the background: one thread per process for each kind of transport."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Background:
    """A thread that calls functions in rounds until each returns True. It sleeps while it has none.

    Args:
        pause: called between two rounds; waits for a short time.
    """

    def __init__(self, pause: Callable[[], object]) -> None:
        self._pause = pause
        self._new: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._stopped = False
        self._starting = threading.Lock()
        os.register_at_fork(after_in_child=self._forked)

    def add(self, work: Callable[[], bool]) -> None:
        """Call `work` in every round until it returns True or raises an error: the program meets that itself, later."""
        self._new.put(work)
        with self._starting:  # several threads may add work at once, and `stop` ends one thread only
            if self._thread is None or not self._thread.is_alive():  # a forked process has no thread
                self._thread = threading.Thread(target=self._loop, name="hvd_dyncomp", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread and wait for that. When Python exits: in C++ it would not survive this."""
        self._stopped = True
        if self._thread is not None and self._thread.is_alive():
            self._new.put(lambda: True)
            self._thread.join()

    def _forked(self) -> None:
        """In a child, which a thread that holds the lock does not live on in."""
        self._starting = threading.Lock()

    def _loop(self) -> None:
        works = [self._new.get()]
        while not self._stopped:
            self._pause()
            while not self._new.empty():
                works.append(self._new.get())
            works = [work for work in works if not _over(work)]
            if not works and not self._stopped:  # in the same list: finished work must not be kept alive
                works.append(self._new.get())


def _over(work: Callable[[], bool]) -> bool:
    try:
        return work()
    except Exception:  # as when Horovod is shut down with a step in flight
        logger.debug("background work has ended with an error", exc_info=True)
        return True
