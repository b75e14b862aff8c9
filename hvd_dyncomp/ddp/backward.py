"""One backward pass: from the first bucket that the model's hook gets until all gradients are means."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.streams import Streams, streams_of
from hvd_dyncomp.levels import UNCOMPRESSED


class Backward:
    """One backward pass that exchanges gradients.

    Args:
        step: the step of the gradients; it has begun.
        slots: places of compressed parameters, by name.
        end: waits until all gradients are means, and ends the step.

    Attributes:
        complete: whether all have, and they are not means yet.
        latest_pass: of autograd's, the one that has brought the latest bucket.
        ends_itself: whether something is called where that pass ends, before the model waits for its buckets.
    """

    def __init__(
        self,
        step: Step,
        *,
        slots: Mapping[str, Slot],
        end: Callable[[Step], None],
    ) -> None:
        self._step, self._slots, self._end = step, slots, end
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []
        self._origins: dict[Streams, Any] = {}  # the stream of the latest hook
        self.complete = self.ends_itself = False
        self.latest_pass: int | None = None

    def future_of(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What the model waits for before it uses a bucket: complete with the last mean, or after an error."""
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] * buffer.is_cuda)
        self._futures.append((future, buffer))
        return future

    def on_bucket(self, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> None:
        """Take all gradients of one of the model's buckets."""
        began = time.perf_counter()
        streams = streams_of(bucket.buffer().device)
        self._origins[streams] = streams.origin()
        self._reduce(bucket, names)
        step = self._step
        for parameter, gradient in _gradients(bucket) if step.bits != UNCOMPRESSED else ():
            if (slot := self._slots.get(names[parameter])) is not None:
                step.add(slot, gradient)
        self._step.traffic.seconds += time.perf_counter() - began

    def _reduce(self, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> None:
        """Take what travels uncompressed."""
        step = self._step
        every = step.bits == UNCOMPRESSED
        rest = {names[p]: gradient for p, gradient in _gradients(bucket) if every or names[p] not in self._slots}
        if rest:
            # Not by its index, which torch says is 0 of every bucket in the first pass with `static_graph`.
            step.reduce(names[bucket.parameters()[0]], rest)

    def give_up(self) -> None:
        """After an error: complete every future, as the model waits for all of them."""
        for future, buffer in self._futures:
            if not future.done():
                with suppress(Exception):  # it is complete all the same
                    future.set_result(buffer)

    def collect(self) -> None:
        """Block until all gradients are means; the time counts as exchange time. After an error call `give_up`."""
        began = time.perf_counter()
        with ExitStack() as stack, torch.no_grad():
            # Code that waits for a future also waits for what is queued in these streams when its result is set.
            for streams, origin in self._origins.items():
                stack.enter_context(streams.queued_in(origin))
            self._end(self._step)
            for future, buffer in self._futures:
                future.set_result(buffer)
        self._step.traffic.seconds += time.perf_counter() - began
        self.complete = False


def _gradients(bucket: dist.GradBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The parameters of a bucket, with their gradients."""
    parameters = bucket.parameters()
    # torch lists no gradients of a sparse one, and complex ones as real ones of half their length.
    whole = bucket.buffer().is_sparse or parameters[0].is_complex()
    gradients = [bucket.buffer()] if whole else bucket.gradients()
    return zip(parameters, gradients, strict=not whole)
