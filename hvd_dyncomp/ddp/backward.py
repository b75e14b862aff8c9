"""One backward pass: from the first bucket that the model's hook gets until all gradients are means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Variable

from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.intake import Taken
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.streams import Streams, streams_of
from hvd_dyncomp.meter import Traffic
from hvd_dyncomp.transport.staging import on_gpu


class _Reduction(NamedTuple):
    """The uncompressed gradients of one of the model's buckets, in its process group: one all-reduce per dtype."""

    works: list[Any]
    parts: list[tuple[torch.Tensor, list[Taken], float]]  # what is reduced, its gradients, and the factor of the sum

    def finish(self) -> None:
        for work in self.works:
            work.wait()  # on a GPU, the current stream waits
        for flat, taken, factor in self.parts:
            if on_gpu(flat):  # made in the stream of another hook
                for memory in (flat._indices(), flat._values()) if flat.is_sparse else (flat,):
                    memory.record_stream(torch.cuda.current_stream(flat.device))
            flat *= factor
            start = 0
            for _, gradient, _ in taken:
                gradient.copy_(flat[start : start + gradient.numel()].view(gradient.shape))
                start += gradient.numel()


def call_at_end(function: Callable[[], None]) -> bool:
    """Have a function called when backward has ended, after all that was told so before; return whether one runs."""
    try:
        Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return False
    return True


class Backward:
    """One backward pass that exchanges gradients.

    Args:
        step: the step of the gradients; it has begun. A failed one takes none.
        factor: multiplies sums over ranks.
        group: the model's process group.
        ended: called at the end by the thread that has waited, with the error or None; again after a later error.

    Attributes:
        complete: whether all gradients have arrived.
        gradients: how many have arrived.
        over: set when they are means, or there is an error.
        failure: why this rank has given up to take gradients, or None.
    """

    def __init__(
        self,
        step: Step | FailedStep,
        *,
        factor: float,
        group: Any,
        ended: Callable[[Step | FailedStep, Exception | None], None],
    ) -> None:
        self.failure: Exception | None = None
        self._traffic = Traffic() if isinstance(step, FailedStep) else step.traffic
        self._step, self._factor, self._group, self._ended = step, factor, group, ended
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []
        self._reductions: list[_Reduction] = []
        self._origins: dict[Streams, Any] = {}  # the stream of the latest hook
        self.gradients, self.complete, self.over = 0, False, threading.Event()

    def add(self, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> torch.futures.Future[torch.Tensor]:
        """Take all gradients of one of the model's buckets. After an error, only make the future that it waits for."""
        began = time.perf_counter()
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] * on_gpu(buffer))
        self._futures.append((future, buffer))
        self.gradients += len(bucket.parameters())
        if self.failure is None and not isinstance(self._step, FailedStep):
            try:
                self._take(self._step, bucket, names)
            except Exception as error:  # noqa: BLE001  # the model waits for all its buckets, and others for this rank
                self.failure = error
                self._step.give_up()
        self._traffic.seconds += time.perf_counter() - began
        return future

    def _take(self, step: Step, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> None:
        buffer = bucket.buffer()
        streams = streams_of(buffer.device)
        self._origins[streams] = streams.origin()
        first = bucket.parameters()[0]
        if buffer.is_sparse:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            self._reductions.append(_Reduction([work], [(buffer, [], self._factor)]))
        elif first.is_complex():  # its gradients are listed as real ones of half their length
            self._reduce([step.take(buffer, names[first], first)])
        else:
            pairs = zip(bucket.gradients(), bucket.parameters(), strict=True)
            taken = [step.take(gradient, names[parameter], parameter) for gradient, parameter in pairs]
            self._reduce([each for each in taken if not each.compressed])

    def _reduce(self, rest: list[Taken]) -> None:
        """Reduce uncompressed gradients in the model's process group, on all ranks in the order of its buckets."""
        parts = []
        for dtype in dict.fromkeys(taken.wire.dtype for taken in rest):
            taken = [each for each in rest if each.wire.dtype is dtype]
            flat = torch.cat([each.wire.reshape(-1) for each in taken])
            if dtype is torch.float16:  # whose sum may be too large where the mean is not
                parts.append((flat * self._factor, taken, 1.0))
            else:
                parts.append((flat, taken, self._factor))
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat, *_ in parts]
        self._reductions.append(_Reduction(works, parts))

    def end(self) -> None:
        """All gradients have arrived. A new thread waits for the other ranks, because a hook must not."""
        self.complete = True
        threading.Thread(target=self._collect, name="hvd_dyncomp.collect", daemon=True).start()

    def wait(self) -> None:
        """Block until it is over; the time counts as exchange time."""
        began = time.perf_counter()
        self.over.wait()
        self._traffic.seconds += time.perf_counter() - began

    def waiting(self, then: Callable[[], None], interrupted: Callable[[BaseException], None]) -> Iterator[None]:
        """Wait when backward has ended: the second `next` does, whatever happens; the first only begins.

        The model ends its pass after it, and could never be used again if this raised. What a signal handler raises
        before the first line of a function cannot be caught there; in a generator it can, where it is suspended.

        Args:
            then: called when the model has ended its pass, too.
            interrupted: gets what a signal handler has raised.
        """
        begun = told = False
        while True:
            try:
                if not begun:
                    begun = True
                    yield
                self.wait()
                if not told:
                    told = call_at_end(then)
                yield
            except GeneratorExit:
                return
            except BaseException as error:  # noqa: BLE001  # raised later
                interrupted(error)

    def _collect(self) -> None:
        error: Exception | None = None
        try:
            with ExitStack() as stack:
                # Code that waits for a future also waits for what is queued in these streams when its result is set.
                for streams, origin in self._origins.items():
                    stack.enter_context(streams.queued_in(origin))
                error = self._means()
                self._ended(self._step, error)
                for future, buffer in self._futures:
                    future.set_result(buffer)
        except Exception as caught:  # noqa: BLE001  # a GPU that has failed may raise in any call
            self._ended(self._step, error or caught)
        self._complete_futures()
        self.over.set()

    def _means(self) -> Exception | None:
        """Wait for all means; return the error if there is one. Backward raises it at its end."""
        try:
            with torch.no_grad():
                if self.failure is not None:
                    raise self.failure
                self._step.collect()
                for reduction in self._reductions:
                    reduction.finish()
        except Exception as error:  # noqa: BLE001
            return error
        return None

    def _complete_futures(self) -> None:
        """Those that are left after an error: the model waits for every one."""
        for future, buffer in self._futures:
            if not future.done():
                with suppress(Exception):  # it is complete all the same
                    future.set_result(buffer)
