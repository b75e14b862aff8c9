"""What goes on beside the program: one thread a process for each kind of transport."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """A thread which calls what it was given until there is nothing left to do, and then sleeps.

    Args:
        pause: called between two rounds; waits a little.
    """

    def __init__(self, pause: Callable[[], object]) -> None:
        self._pause = pause
        self._new: queue.SimpleQueue[Callable[[], bool]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, work: Callable[[], bool]) -> None:
        """Has `work` called in every round until it returns True."""
        self._new.put(work)
        if self._thread is None or not self._thread.is_alive():  # a process that was forked has no thread
            self._thread = threading.Thread(target=self._loop, name="hvd_dyncomp", daemon=True)
            self._thread.start()

    def _loop(self) -> None:
        works = [self._new.get()]
        while True:
            self._pause()
            while not self._new.empty():
                works.append(self._new.get())
            works = [work for work in works if not work()]
            if not works:  # a list of its own: what is over must not live on here
                works.append(self._new.get())
