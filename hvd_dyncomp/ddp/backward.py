"""One backward pass: what the model's hook is handed, until all gradients are means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_dyncomp.exchange.intake import Taken
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.streams import Streams, streams_of
from hvd_dyncomp.transport.staging import on_gpu


class _Reduction(NamedTuple):
    """What of one of the model's buckets travels uncompressed, in its own process group: one all-reduce a dtype."""

    works: list[Any]
    parts: list[tuple[torch.Tensor, list[Taken]]]  # what is reduced, and whose it is

    def finish(self, factor: float) -> None:
        for work in self.works:
            work.wait()  # of a GPU's, the current stream does
        for flat, taken in self.parts:
            if on_gpu(flat):  # made in the stream of its own bucket's hook
                flat.record_stream(torch.cuda.current_stream(flat.device))
            flat *= factor
            start = 0
            for _, gradient, _ in taken:
                gradient.copy_(flat[start : start + gradient.numel()].view(gradient.shape))
                start += gradient.numel()


class Backward:
    """One backward pass that exchanges gradients.

    Args:
        step: that the gradients are of; it has begun.
        factor: what sums over ranks are multiplied by.
        group: the model's process group.
        ended: called when all is over, by the thread that has waited for it, with the error if there is one.

    Attributes:
        complete: whether all gradients have come.
        over: set when they are the means, or there is an error.
    """

    def __init__(
        self, step: Step, *, factor: float, group: Any, ended: Callable[[Step, Exception | None], None]
    ) -> None:
        self._step, self._factor, self._group, self._ended = step, factor, group, ended
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []
        self._reductions: list[_Reduction] = []
        self._origins: dict[Streams, Any] = {}  # where the latest hook was queued
        self.complete, self.over = False, threading.Event()

    def add(self, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> torch.futures.Future[torch.Tensor]:
        """Takes all gradients of one of the model's buckets."""
        began = time.perf_counter()
        buffer = bucket.buffer()
        streams = streams_of(buffer.device)
        self._origins[streams] = streams.origin()
        if buffer.is_sparse:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            self._reductions.append(_Reduction([work], [(buffer, [])]))
        else:
            pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
            taken = [self._step.take(gradient, names[parameter], parameter) for gradient, parameter in pairs]
            self._reduce([each for each in taken if not each.compressed])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] * on_gpu(buffer))
        self._futures.append((future, buffer))
        self._step.traffic.seconds += time.perf_counter() - began
        return future

    def _reduce(self, rest: list[Taken]) -> None:
        """What travels uncompressed goes by the model's own process group, in which its buckets are in order."""
        parts = []
        for dtype in dict.fromkeys(taken.wire.dtype for taken in rest):
            taken = [each for each in rest if each.wire.dtype is dtype]
            parts.append((torch.cat([each.wire.reshape(-1) for each in taken]), taken))
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat, _ in parts]
        self._reductions.append(_Reduction(works, parts))

    def end(self) -> None:
        """All gradients have come. What waits for the other ranks' is a thread of its own, as no hook may."""
        self.complete = True
        threading.Thread(target=self._collect, name="hvd_dyncomp.collect", daemon=True).start()

    def wait(self) -> None:
        """Blocks until it is over; the time counts as the exchange's."""
        began = time.perf_counter()
        self.over.wait()
        self._step.traffic.seconds += time.perf_counter() - began

    def _collect(self) -> None:
        error: Exception | None = None
        with ExitStack() as stack:
            # A future has whoever waits for it wait for what is queued here by then.
            for streams, origin in self._origins.items():
                stack.enter_context(streams.queued_in(origin))
            try:
                with torch.no_grad():
                    self._step.collect()
                    for reduction in self._reductions:
                        reduction.finish(self._factor)
            except Exception as caught:  # noqa: BLE001  # raised where backward ends
                error = caught
            self._ended(self._step, error)
            self.over.set()
            for future, buffer in self._futures:
                try:
                    future.set_result(buffer)
                except Exception as broken:  # noqa: BLE001  # a GPU that cannot record an event: nobody is to wait
                    future.set_exception(broken)
