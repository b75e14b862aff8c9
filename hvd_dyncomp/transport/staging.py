"""Messages of a GPU: they leave from main memory and come back from there. Never run on a GPU.

A copy to main memory is only queued when it is asked for. It is complete later, after what was queued in its stream
before, and a hook must not wait for that. So a thread for each stream waits for the copies and hands them on.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

# Sends a message: rank, key, body (uint8), and what to call when the body's memory is no longer read. Never blocks.
Post = Callable[[int, bytes, torch.Tensor, Callable[[], None]], None]


def on_gpu(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on a GPU. torch calls AMD's "cuda", too."""
    return tensor.is_cuda


def pinned(nbytes: int) -> torch.Tensor:
    """(nbytes,) uint8 of main memory, from and to which a GPU copies while the program goes on."""
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
        if on_gpu(part):  # made in another stream: its memory must not be used anew before it has been copied
            part.record_stream(stream)
    return whole


class Staging:
    """Sends messages from main memory, those of a GPU when they have been copied there. Several threads may use it.

    Args:
        post: sends what is in main memory.
        failed: called with the error if a GPU cannot copy.
    """

    def __init__(self, post: Post, failed: Callable[[Exception], None]) -> None:
        self._post, self._failed = post, failed
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, ThreadPoolExecutor] = {}  # by stream

    def post(self, rank: int, key: bytes, body: torch.Tensor, sent: Callable[[], None]) -> None:
        """As `Post` has it. A copy is queued in the current stream."""
        if not on_gpu(body):
            self._post(rank, key, body, sent)
            return
        copy = pinned(body.numel())
        copy.copy_(body, non_blocking=True)
        stream = torch.cuda.current_stream(body.device)
        complete = torch.cuda.Event(blocking=True)  # the thread sleeps meanwhile
        complete.record(stream)
        device = body.device

        def hand_on() -> None:
            try:
                with torch.cuda.device(device):  # a new thread's is 0, where waiting would take memory for every rank
                    complete.synchronize()
            except Exception as error:  # noqa: BLE001  # raised by whoever waits for a message
                self._failed(error)
                sent()
            else:
                self._post(rank, key, copy, sent)

        self._thread_of(stream).submit(hand_on)

    def _thread_of(self, stream: Hashable) -> ThreadPoolExecutor:
        """No copy waits for those in another stream: what was received must not wait for backward."""
        with self._lock:
            if stream not in self._waiting:
                self._waiting[stream] = ThreadPoolExecutor(1, "hvd_dyncomp.staging")
            return self._waiting[stream]

    def room(self, nbytes: int) -> torch.Tensor:
        """(nbytes,) uint8 of main memory for what arrives."""
        return pinned(nbytes) if self._waiting else torch.empty(nbytes, dtype=torch.uint8)

    def close(self) -> None:
        """Hands on all copies that have been queued; blocks until then."""
        for thread in self._waiting.values():
            with contextlib.suppress(RuntimeError):  # it is this thread that closes, which cannot wait for itself
                thread.shutdown()
