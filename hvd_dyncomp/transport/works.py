"""One collective under way: what torch calls works, of which it may need several."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

_POLL_SECONDS = 1e-3

Start = Callable[[], tuple[list[Any], torch.Tensor]]


def told(error: Exception) -> str:
    """What an error of torch's says, without its source's path and general advice."""
    return re.sub(r"^\[[^ ]*\] ", "", str(error).partition("\n")[0].partition(". This is")[0])


def timed_out(text: str) -> bool:
    """Whether an error of torch's says that ranks did not come in time; what else was under way then ends with it."""
    return "imed out" in text or "imeout" in text


# In the errors of torch and Gloo; they have no class of their own. Gloo's have the path of its source.
_LOST = re.compile(r"gloo/transport|connect|peer|socket|network|broken pipe|closed", re.IGNORECASE)


def lost(error: Exception) -> bool:
    """Whether an error of torch's says that a connection has ended, or could not be made."""
    kinds = (torch.distributed.DistNetworkError, torch.distributed.DistStoreError)
    return isinstance(error, kinds) or _LOST.search(str(error)) is not None


class Works:
    """One collective, as one rank sees it.

    Args:
        name: for messages.
        sent: the tensor that is sent; it is kept until all is over.
        news: called by any thread when something has arrived.
        in_order: whether its works and what reads their results are queued on a GPU: nobody waits for them.

    Attributes:
        name: see above.
        then: what starts a second part, from the result of the first.
        since: when somebody began to wait for it, in seconds; None if nobody has.
        number: see `ProcessGroupTransport._begun`; 0 for others.
    """

    def __init__(self, name: str, sent: torch.Tensor, news: Callable[[], None], *, in_order: bool) -> None:
        self.name, self._sent, self._news, self._in_order = name, sent, news, in_order
        self.then: Callable[[torch.Tensor], tuple[list[Any], torch.Tensor]] | None = None
        self.since: float | None = None
        self.number = 0
        self._works: list[Any] | None = None
        self._result = sent
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._missing = 0
        self._arrived = threading.Event()

    def start(self, start: Start) -> None:
        """Start it. An error is kept."""
        self._arrived.clear()
        try:
            works, self._result = start()
        except Exception as error:  # noqa: BLE001  # raised by `result`; the ranks must start the rest all the same
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
        """Block until it is over, for some seconds at most; return whether it is."""
        until = time.monotonic() + seconds
        while not self.over:
            left = until - time.monotonic()
            if left <= 0:
                return False
            # It may still wait for its turn.
            self._arrived.wait(left if self._works is not None else min(left, _POLL_SECONDS))
        return True

    def result(self) -> torch.Tensor:
        """What was received, when it is over. On a GPU, the current stream waits for it.

        Raises:
            TimeoutError: a rank has not come in the process group's time limit.
            ConnectionError: a rank has ended.
        """
        name = self.name.partition("#")[0]
        if self._error is not None:
            raise self._error
        try:
            for work in self._works or ():
                work.wait()
        except RuntimeError as error:
            text = told(error)
            if timed_out(text):
                raise TimeoutError(f"{name}: not all ranks came in the process group's time limit: {text}") from error
            if not lost(error):
                raise
            raise ConnectionError(f"{name}: the connection to a rank was lost: {text}; its output says why") from error
        if self._in_order:  # its memory belongs to the stream in which it was made, and torch lets go of it in `wait`
            self._sent.record_stream(torch.cuda.current_stream(self._sent.device))
        return self._result
