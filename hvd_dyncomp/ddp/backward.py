"""One backward pass: from the first bucket that the model's hook gets until all gradients are means."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd import Variable

from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.streams import Streams, streams_of
from hvd_dyncomp.exchange.unused import has_values
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.transport.staging import on_gpu


class _Reduction(NamedTuple):
    """The uncompressed gradients of one of the model's buckets, in its process group: one all-reduce per dtype."""

    works: list[Any]
    parts: list[tuple[torch.Tensor, list[torch.Tensor], float]]  # what is reduced, its gradients, the sum's factor

    def finish(self) -> None:
        for work in self.works:
            work.wait()  # on a GPU, the current stream waits
        for flat, gradients, factor in self.parts:
            if on_gpu(flat):  # made in the stream of another hook
                for memory in (flat._indices(), flat._values()) if flat.is_sparse else (flat,):
                    memory.record_stream(torch.cuda.current_stream(flat.device))
            flat *= factor
            start = 0
            for gradient in gradients:
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
        slots: places of compressed parameters, by name.
        wire: returns what travels in place of an uncompressed gradient, by name and gradient.
        factor: multiplies sums over ranks.
        tells_used: whether a gradient means that this rank uses the parameter.
        group: the model's process group.
        ended: called by the thread that has waited for all means, with the step, and the error or None.

    Attributes:
        failed: whether the step has failed: then the model waits for nothing.
        gradients: how many have arrived.
        complete: whether all have.
        ends_itself: whether something is called where backward ends.
    """

    def __init__(
        self,
        step: Step | FailedStep,
        *,
        slots: Mapping[str, Slot],
        wire: Callable[[str, torch.Tensor], torch.Tensor],
        factor: float,
        tells_used: bool,
        group: Any,
        ended: Callable[[Step, BaseException | None], None],
    ) -> None:
        self._step, self._slots, self._factor, self._tells_used = step, slots, factor, tells_used
        self._wire, self._group, self._ended = wire, group, ended
        self._futures: list[tuple[torch.futures.Future, torch.Tensor]] = []
        self._reductions: list[_Reduction] = []
        self._reduced: set[int] = set()  # indices of buckets whose reductions have begun
        self._origins: dict[Streams, Any] = {}  # the stream of the latest hook
        self._over = threading.Event()
        self.failed = isinstance(step, FailedStep)
        self.gradients = 0
        self.complete = self.ends_itself = False

    def future_of(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """What the model waits for before it uses a bucket: complete with the last mean, or after an error."""
        buffer = bucket.buffer()
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=[buffer.device] * on_gpu(buffer))
        self._futures.append((future, buffer))
        self.gradients += len(bucket.parameters())
        if self.failed:
            future.set_result(buffer)
        return future

    def take(self, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> None:
        """Take all gradients of one of the model's buckets. A failed step takes only those that travel uncompressed.

        The process group matches collectives by their order: the other ranks start those of this bucket, too.
        """
        began = time.perf_counter()
        buffer = bucket.buffer()
        streams = streams_of(buffer.device)
        self._origins[streams] = streams.origin()
        first = bucket.parameters()[0]
        if buffer.is_sparse:
            work = dist.all_reduce(buffer, group=self._group, async_op=True)
            self._reductions.append(_Reduction([work], [(buffer, [], self._factor)]))
            self._reduced.add(bucket.index())
        elif first.is_complex():  # its gradients are listed as real ones of half their length
            self._reduce(bucket.index(), [(self._wire(names[first], buffer), buffer)])
        else:
            rest = []
            for gradient, parameter in zip(bucket.gradients(), bucket.parameters(), strict=True):
                name = names[parameter]
                slot = self._slots.get(name)
                if slot is None or self._step.bits == UNCOMPRESSED:
                    rest.append((self._wire(name, gradient), gradient))
                elif not (self.failed or isinstance(self._step, FailedStep)):
                    self._step.add(slot, gradient, self._tells_used or _is_used(gradient))
            self._reduce(bucket.index(), rest)
        self._step.traffic.seconds += time.perf_counter() - began

    def _reduce(self, index: int, rest: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Reduce what travels uncompressed in the model's process group, on all ranks in the order of its buckets.

        Args:
            index: of the bucket.
            rest: (what travels, the gradient that gets the mean).
        """
        parts = []
        for dtype in dict.fromkeys(wire.dtype for wire, _ in rest):
            wires, gradients = zip(*[pair for pair in rest if pair[0].dtype is dtype], strict=True)
            flat = torch.cat([wire.reshape(-1) for wire in wires])
            if dtype is torch.float16:  # whose sum may be too large where the mean is not
                parts.append((flat * self._factor, list(gradients), 1.0))
            else:
                parts.append((flat, list(gradients), self._factor))
        works = [dist.all_reduce(flat, group=self._group, async_op=True) for flat, *_ in parts]
        self._reduced.add(index)
        self._reductions.append(_Reduction(works, parts))

    def end(self) -> None:
        """All gradients have arrived. A new thread waits for the other ranks, because a hook must not."""
        self.complete = True
        if not self.failed:
            threading.Thread(target=self._collect, name="hvd_dyncomp.collect", daemon=True).start()

    def give_up(self) -> None:
        """After an error in a hook: the model waits for nothing."""
        self.failed = True
        self._complete_futures()

    def take_rest(self, bucket: dist.GradBucket, names: Mapping[torch.Tensor, str]) -> None:
        """After an error in `take`: what travels uncompressed, if it was not taken."""
        if bucket.index() not in self._reduced:
            self.take(bucket, names)

    def wait(self) -> None:
        """Block until all gradients are means, or there is an error; the time counts as exchange time."""
        began = time.perf_counter()
        self._over.wait()
        self._step.traffic.seconds += time.perf_counter() - began

    def _collect(self) -> None:
        error: BaseException | None = None
        step: Any = self._step
        try:
            with ExitStack() as stack, torch.no_grad():
                # Code that waits for a future also waits for what is queued in these streams when its result is set.
                for streams, origin in self._origins.items():
                    stack.enter_context(streams.queued_in(origin))
                try:
                    step.collect()
                    for reduction in self._reductions:
                        reduction.finish()
                except BaseException as caught:  # noqa: BLE001  # raised where backward ends
                    error = caught
                self._ended(step, error)
                for future, buffer in self._futures:
                    future.set_result(buffer)
        except Exception as caught:  # noqa: BLE001  # a GPU that has failed may raise in any call
            self._ended(step, error or caught)
        self._complete_futures()
        self._over.set()

    def _complete_futures(self) -> None:
        """Those that are left after an error: the model waits for every one."""
        for future, buffer in self._futures:
            if not future.done():
                with suppress(Exception):  # it is complete all the same
                    future.set_result(buffer)


def _is_used(gradient: torch.Tensor) -> bool | torch.Tensor:
    """Whether this rank uses the gradient's parameter: otherwise it is zeros. Does not wait for a GPU."""
    return gradient.any() if gradient.is_cuda else has_values(gradient)
