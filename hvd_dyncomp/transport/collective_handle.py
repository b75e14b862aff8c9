"""The handle of one collective over process groups, which may consist of several of torch's works."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_POLL_SECONDS = 1e-3

Start = Callable[[], tuple[list[Any], torch.Tensor]]


def message_of(error: Exception) -> str:
    """The text of an error of torch's, without the path of its source and general advice."""
    return re.sub(r"^\[[^ ]*\] ", "", str(error).partition("\n")[0].partition(". This is")[0])


def timed_out(text: str) -> bool:
    """Whether an error of torch's is a timeout. All other collectives of the group end with it."""
    return "imed out" in text or "imeout" in text


# Words in errors of torch and Gloo, which have no class of their own. Gloo's contain the path of its source.
_LOST = re.compile(r"gloo/transport|connect|peer|socket|network|broken pipe|closed", re.IGNORECASE)


def lost(error: Exception) -> bool:
    """Whether an error of torch's says that a connection has ended, or could not be made."""
    kinds = (torch.distributed.DistNetworkError, torch.distributed.DistStoreError)
    return isinstance(error, kinds) or _LOST.search(str(error)) is not None


class CollectiveHandle:
    """One collective on one rank.

    Args:
        name: for messages.
        sent: the tensor that is sent; the handle keeps it until the collective is over.
        news: called, on any thread, when data has arrived.
        in_order: whether a GPU executes the works, and the code that reads their results, in the order of its queue.
            Then a started collective counts as over.

    Attributes:
        name: see above.
        then: starts a second collective from the result of the first, under this handle; or None.
    """

    def __init__(self, name: str, sent: torch.Tensor, news: Callable[[], None], *, in_order: bool) -> None:
        self.name, self._sent, self._news, self._in_order = name, sent, news, in_order
        self.then: Callable[[torch.Tensor], tuple[list[Any], torch.Tensor]] | None = None
        self._works: list[Any] | None = None
        self._result = sent
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._missing = 0
        self._arrived = threading.Event()

    def start(self, start: Start) -> None:
        """Start the collective. An error is stored."""
        self._arrived.clear()
        try:
            works, self._result = start()
        except Exception as error:  # noqa: BLE001  # raised by `result`; the other collectives must start nevertheless
            works, self._error = [], error
        self._missing = 0 if self._in_order else len(works)
        self._works = works
        for work in works if self._missing else ():
            work.get_future().add_done_callback(self._one_is_over)
        if not self._missing:
            self._arrived.set()

    def _one_is_over(self, future: Any) -> None:
        with self._lock:
            self._missing -= 1
            last = not self._missing
        if last:
            self._arrived.set()
            self._news()

    @property
    def over(self) -> bool:
        """Whether `result` would not block."""
        if self._works is None or not self._arrived.is_set():
            return False
        if self.then is not None and self._error is None:
            then, self.then = self.then, None
            try:
                first = self.result()
            except Exception as error:  # noqa: BLE001  # raised again by `result`
                self._error = error
                return True
            self.start(lambda: then(first))
            return self.over
        return True

    def wait(self, seconds: float) -> bool:
        """Block until the collective is over, or for some seconds; return whether it is over."""
        until = time.monotonic() + seconds
        while not self.over:
            left = until - time.monotonic()
            if left <= 0:
                return False
            # Without works it still waits for its turn to start.
            self._arrived.wait(left if self._works is not None else min(left, _POLL_SECONDS))
        return True

    def result(self) -> torch.Tensor:
        """The received tensor, once the collective is over. On a GPU, the current stream waits for it.

        Raises:
            TimeoutError: a rank has not joined within the process group's time limit.
            ConnectionError: a rank has ended.
        """
        if self._error is not None:
            raise self._error
        try:
            for work in self._works or ():
                work.wait()
        except RuntimeError as error:
            text = message_of(error)
            if timed_out(text):
                raise TimeoutError(
                    f"{self.name}: not all ranks joined within the time limit of the process group: {text}"
                ) from error
            if not lost(error):
                raise
            raise ConnectionError(
                f"{self.name}: the connection to a rank was lost: {text}; the output of that rank says why"
            ) from error
        if (
            self._in_order
        ):  # the memory belongs to the stream that allocated it, and torch drops its reference in `wait`
            self._sent.record_stream(torch.cuda.current_stream(self._sent.device))
        return self._result
