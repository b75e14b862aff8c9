"""The streams of a device: none on a CPU, two CUDA streams of this package on a GPU.

A GPU executes queued work later, while the program continues. One stream is for outgoing messages, which are made
during backward, each as soon as its gradients exist. The other is for incoming messages, which must not wait behind
gradients that are still missing. The program waits for the GPU once per step, in `catch_up`, when everything has been
received.

Without a GPU, tests/exchange/test_streams.py looks for races with simulated streams.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hvd_dyncomp.ranges import marked

_POLL_SECONDS = 1e-4


class Streams:
    """The streams of a CPU, which does everything at once.

    Attributes:
        late: whether a copy to the host is complete only after `catch_up`.
    """

    late = False

    def origin(self) -> Any:
        """The current stream of the program: autograd may use several."""
        return None

    def outgoing(self, origins: Iterable[Any]) -> AbstractContextManager[Any]:
        """Queue the making of messages, after all that is queued in `origins` now."""
        return nullcontext()

    def incoming(self) -> AbstractContextManager[Any]:
        """Queue work on received messages. Everything that made them is complete, on the rank that sent them."""
        return nullcontext()

    def queued_in(self, origin: Any) -> AbstractContextManager[Any]:
        """Queue in the stream that `origin` returned: for a thread that continues the program's work."""
        return nullcontext()

    def behind(self) -> Callable[[], float] | None:
        """On a GPU, a clock that starts when all that the program has queued by now is done.

        Returns:
            What stops the clock when everything queued in `incoming` is done, and returns the seconds; called after
            `catch_up`. None on a CPU, where the program itself is blocked.
        """
        return None

    def synchronize(self) -> None:
        """Order all that is queued in both streams before the program's further work. The last call in each step."""

    def keep(self, *tensors: torch.Tensor) -> None:
        """Keep the memory of tensors that were made elsewhere until `incoming` has used it."""

    def catch_up(self) -> None:
        """Block until everything queued in `incoming` is done."""


class CudaStreams(Streams):
    """The streams of a GPU. See `Streams`."""

    late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Higher priority than backward's kernels: other ranks wait for the messages.
        self._outgoing = torch.cuda.Stream(device, priority=-1)
        self._incoming = torch.cuda.Stream(device, priority=-1)

    def origin(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def outgoing(self, origins: Iterable[torch.cuda.Stream]) -> AbstractContextManager[Any]:
        for origin in set(origins):
            self._outgoing.wait_stream(origin)
        return self.queued_in(self._outgoing)

    def incoming(self) -> AbstractContextManager[Any]:
        return self.queued_in(self._incoming)

    @contextmanager
    def queued_in(self, origin: torch.cuda.Stream) -> Iterator[None]:
        # A new thread begins with device 0. `torch.cuda.stream` alone would set device 0 again on exit, which takes
        # memory there for every rank of a machine; `torch.cuda.device` does so only if the process uses device 0.
        with torch.cuda.device(self._device), torch.cuda.stream(origin):
            yield

    def behind(self) -> Callable[[], float]:
        ready = torch.cuda.Event(enable_timing=True)
        ready.record(self.origin())

        def seconds() -> float:
            over = torch.cuda.Event(enable_timing=True)
            over.record(self._incoming)
            for event in (ready, over):
                event.synchronize()
            return max(0.0, ready.elapsed_time(over) / 1e3)

        return seconds

    def synchronize(self) -> None:
        for stream in (self._outgoing, self._incoming):
            self.origin().wait_stream(stream)

    def keep(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.record_stream(self._incoming)  # type: ignore[arg-type]  # torch's stub has the base class

    @marked("catch_up")
    def catch_up(self) -> None:
        while not self._incoming.query():  # to synchronize would keep a signal from its handler
            time.sleep(_POLL_SECONDS)


_CPU = Streams()


@functools.cache
def _cuda_streams(device: torch.device) -> CudaStreams:
    return CudaStreams(device)


def streams_of(device: torch.device) -> Streams:
    """The streams that all buckets on a device share."""
    return _cuda_streams(device) if device.type == "cuda" else _CPU


def uploaded(here: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on a device of a tensor in main memory. Does not wait for the device."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
