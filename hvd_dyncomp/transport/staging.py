"""Messages of a GPU, which are sent and received through main memory. Never run on a GPU.

A copy to main memory is queued in a stream and is complete later, after all earlier work in that stream. A hook must
not wait for it. So one thread for each stream waits for its copies and sends them.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence

import torch

# Sends a message: rank, key, body (uint8), and a function to call when the body's memory is free. Never blocks.
Post = Callable[[int, bytes, torch.Tensor, Callable[[], None]], None]


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU. torch calls AMD's "cuda", too."""
    return tensor.is_cuda


def pinned(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 of pinned main memory, with which a GPU copies while the program continues."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def joined(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Parts of a message as one vector on the device of `like`. Does not wait for a GPU.

    Args:
        parts: (n,) uint8 each, on that device or in main memory.
    """
    if not on_gpu(like):
        return torch.cat(list(parts))
    whole = torch.empty(sum(part.numel() for part in parts), dtype=torch.uint8, device=like.device)
    stream = torch.cuda.current_stream(like.device)
    for part, room in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        room.copy_(part, non_blocking=True)
        if on_gpu(part):  # made in another stream: its memory must not be reused before it is copied
            part.record_stream(stream)
    return whole


class _Copies:
    """Those of one stream: a thread that waits for one after the other. A daemon, unlike an executor's, which Python
    joins when it exits: a GPU that waits for a rank that has ended would keep it.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._loop, name="hvd_dyncomp.staging", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self, seconds: float) -> None:
        """End when all jobs are done; block until then, for some seconds at most."""
        self._jobs.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # and the memory that it holds


class Staging:
    """Sends messages; those of a GPU when they have been copied to main memory. Several threads may use it.

    Args:
        post: sends a message from main memory.
        failed: called with the error if a GPU cannot copy.
    """

    def __init__(self, post: Post, failed: Callable[[Exception], None]) -> None:
        self._post, self._failed = post, failed
        self._lock = threading.Lock()
        self._copies: dict[Hashable, _Copies] = {}  # by stream
        self._device: torch.device | None = None  # of the latest message of a GPU

    def post(self, rank: int, key: bytes, body: torch.Tensor, sent: Callable[[], None]) -> None:
        """Send a message, see `Post`. A copy is queued in the current stream."""
        if not on_gpu(body):
            self._post(rank, key, body, sent)
            return
        self._device = device = body.device
        copy = pinned(body.numel())
        copy.copy_(body, non_blocking=True)
        stream = torch.cuda.current_stream(device)
        complete = torch.cuda.Event(blocking=True)  # the thread sleeps meanwhile
        complete.record(stream)

        def hand_on() -> None:
            try:
                with torch.cuda.device(device):  # a new thread has device 0, where waiting would take memory
                    complete.synchronize()
            except Exception as error:  # noqa: BLE001  # the waiting thread raises it
                self._failed(error)
                sent()
            else:
                self._post(rank, key, copy, sent)

        self._copies_of(stream).submit(hand_on)

    def _copies_of(self, stream: Hashable) -> _Copies:
        """One thread per stream: copies of received data must not wait for backward."""
        with self._lock:
            if stream not in self._copies:
                self._copies[stream] = _Copies()
            return self._copies[stream]

    def room(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of main memory for a message that arrives; pinned, if that is possible."""
        if self._device is None:
            return torch.empty(nbytes, dtype=torch.uint8)
        try:
            with torch.cuda.device(self._device):  # as above: the allocator looks at the current one's events
                return pinned(nbytes)
        except RuntimeError:  # other memory is right as well, only slower
            return torch.empty(nbytes, dtype=torch.uint8)

    def close(self, seconds: float = 10.0) -> None:
        """Send all queued copies; block until then, for some seconds at most."""
        until = time.monotonic() + seconds
        for copies in self._copies.values():
            copies.close(max(0.0, until - time.monotonic()))
