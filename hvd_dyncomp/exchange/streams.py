"""Where the work on a device's gradients is queued: nowhere on a CPU, in two CUDA streams of their own on a GPU.

A GPU does what is queued later, while the program goes on. Two streams, because messages are made while backward runs,
each as soon as its gradients are there, and what has been received must not wait behind those that are not: one stream
for what goes out, one for what comes in. The program waits for the GPU once a step, in `catch_up`, when all has been
received, and in hooks only where residuals are divided anew, as ranks have come or gone, or is handed out at 32 bits.

Never run on a GPU: tests/exchange/test_streams.py looks for races with simulated streams.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from hvd_dyncomp.exchange.ranges import marked


class Streams:
    """Of a CPU, on which everything is done when it is called.

    Attributes:
        late: whether what is copied to the host is there only after `catch_up`.
    """

    late = False

    def origin(self) -> Any:
        """Where the program queues now what it computes: autograd may use several streams."""
        return None

    def outgoing(self, origins: Iterable[Any]) -> AbstractContextManager[Any]:
        """Queues what makes messages, after what is queued in `origins` by now."""
        return nullcontext()

    def incoming(self) -> AbstractContextManager[Any]:
        """Queues what works on received messages. Before them, on some rank, came all that made them."""
        return nullcontext()

    def queued_in(self, origin: Any) -> AbstractContextManager[Any]:
        """Queues where the program did, as `origin` said: for a thread that goes on in its place."""
        return nullcontext()

    def join(self) -> None:
        """What has been queued in either direction comes before what the program will queue. In each step, last."""

    def keep(self, *tensors: torch.Tensor) -> None:
        """To be called for what was made elsewhere and is used in `incoming`: its memory is in use until then."""

    def catch_up(self) -> None:
        """Blocks until all is done that has been queued in `incoming`."""


class CudaStreams(Streams):
    """Of a GPU. See `Streams`."""

    late = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Before backward's kernels where both could run: others wait for the messages.
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
        # A thread of its own begins with device 0. By itself `torch.cuda.stream` would set that again when it leaves,
        # which takes memory there, for every rank of a machine; `torch.cuda.device` does so only where it has some.
        with torch.cuda.device(self._device), torch.cuda.stream(origin):
            yield

    def join(self) -> None:
        for stream in (self._outgoing, self._incoming):
            self.origin().wait_stream(stream)

    def keep(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            tensor.record_stream(self._incoming)  # type: ignore[arg-type]  # torch's stub has the base class

    @marked("catch_up")
    def catch_up(self) -> None:
        self._incoming.synchronize()


_CPU = Streams()


@functools.cache
def _cuda_streams(device: torch.device) -> CudaStreams:
    return CudaStreams(device)


def streams_of(device: torch.device) -> Streams:
    """Those that all buckets on a device share."""
    return _cuda_streams(device) if device.type == "cuda" else _CPU


def uploaded(here: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of main memory on a device, for which nothing waits."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)
