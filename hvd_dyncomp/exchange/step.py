"""One step: from its first gradient until all gradients are means."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.bucket_exchange import BucketExchange
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.memory import overlapping
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import StepConfig
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.streams import Streams
from hvd_dyncomp.exchange.sums import Sum, sums_of, wire_form
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.wire import GREETING_BYTES
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter, allreduce_bytes
from hvd_dyncomp.ranges import marked
from hvd_dyncomp.transport.base import in_background


class Step:
    """One step: the front end makes it, calls `start`, adds every gradient, and calls `collect`.

    A background thread advances the step, too: other ranks wait for this rank's messages even while its program is busy
    elsewhere, for instance in another optimizer's step. After an exception in any of these calls the front end must
    call `abandon`, because gradients and residuals may be half written.

    Args:
        plan: the buckets.
        config: number, level and epoch of the step. Later changes of the controller affect the next step.
        meter: counts the bytes.
        absent: names of parameters without a gradient in this step, equal on all ranks. Nothing is written for them.
        to_agree_on: what else must be equal on all ranks: plain data, by the names that error messages use.
        values: a checksum of each parameter, by name, equal on all ranks that have any; None not to compare them.
        buckets: the buckets of the plan that take part in this step, equal on all ranks; None for all. Of the others no
            residual is touched.
        after: an earlier step that is still in flight. This step greets when that one has been agreed on and sent: if
            the ranks disagree on the earlier step, nothing of this one may be in flight.

    Attributes:
        number, bits: of `config`.
        traffic: bytes that this rank has sent in the step's epoch at its level.
        relocated: means that were written to memory of their own, because the gradient's memory holds the mean of
            another parameter; by `id` of the gradient. Valid after `collect`.
        over: whether all gradients are means.
        in_flight: whether all ranks agree and every added gradient is in flight.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        config: StepConfig,
        meter: Meter,
        absent: Collection[str] = (),
        to_agree_on: Mapping[str, Any],
        values: Mapping[str, int] | None = None,
        buckets: Sequence[Bucket] | None = None,
        after: Step | None = None,
    ) -> None:
        self._plan = plan
        self._buckets = plan.buckets if buckets is None else buckets
        self._after, self.in_flight = after, False
        self.number, self.bits = config.number, config.bits
        self._delivers = config.delivers
        self.traffic = meter.at(config.epoch, config.bits)
        self._plain_bytes = GREETING_BYTES * plan.transport.size  # of what is summed uncompressed
        self._float32_bytes = 0  # of all values, if they were float32
        self.relocated: dict[int, torch.Tensor] = {}
        self.over = self._abandoned = False
        self._lock = threading.Lock()  # between the program's thread and the background thread
        self._copied: list[torch.Tensor] = []  # gradients whose copies are sent uncompressed
        self._in_order = plan.transport.in_order and any(bucket.streams.late for bucket in self._buckets)
        self._agreement: Task[None] = Task(plan.transport, plan.handshake(config, to_agree_on, values))
        self._exchanges: list[BucketExchange] = []
        self._sums: list[Sum] = []  # in the order in which they are started
        if config.bits != UNCOMPRESSED:
            self._float32_bytes += sum(4 * bucket.values for bucket in self._buckets)
            self._exchanges = self._new_exchanges(absent)
        # In the order of completion, which DDP and `Averager` keep equal on all ranks.
        self._under_way = [exchange for exchange in self._exchanges if exchange.complete]
        # Uncompressed gradients are reduced in place, as without this package, unless their memory may also hold a
        # compressed gradient; or what was compressed before shares memory.
        self._in_place = plan.source.own_memory or (config.bits == UNCOMPRESSED and bool(self._buckets))

    def _new_exchanges(self, absent: Collection[str]) -> list[BucketExchange]:
        """Exchanges of all buckets, with zeros for parameters that have no gradient."""
        source = self._plan.source
        exchanges = [BucketExchange(each, source, bits=self.bits, step=self.number) for each in self._buckets]
        self._exchange_of = {bucket.number: one for bucket, one in zip(self._buckets, exchanges, strict=True)}
        for slot in filter(None, map(self._plan.slots.get, absent)):
            self._exchange_of[slot.bucket].add(slot, None)
        return exchanges

    def start(self) -> None:
        """Send the greeting, and let the background thread advance the step from now on. Does not block."""
        with self._lock:
            if self._is_first():
                self._agreement.proceed()
        in_background(self._plan.transport, self._in_background)

    def add(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Add the gradient of a compressed parameter, in a step below 32 bits. Does not block."""
        exchange = self._exchange_of[slot.bucket]
        exchange.add(slot, gradient)
        if exchange.complete:
            self._on_bucket_complete(exchange)
            # After the last bucket the program is about to wait anyway, and with a GPU the core is idle.
            if not (gradient.is_cuda or all(exchange.complete for exchange in self._exchanges)):
                self._plan.transport.yield_cpu()

    def _on_bucket_complete(self, exchange: BucketExchange) -> None:
        with self._lock:
            self._under_way.append(exchange)
            exchange.prepare()
            self._keep_order()
            self._poll()

    def _keep_order(self) -> None:
        """Wait for the greetings, if collectives match by their order: they arrive at another time on each rank.

        After a step that the ranks refused, nothing begins and no greeting is sent, because the other ranks send none.
        """
        while self._in_order and self._is_first() and not self._agreement.done:  # this waits for no GPU
            self._agreement.wait()

    def uncompressed(self, gradient: torch.Tensor) -> torch.Tensor:
        """Prepare a gradient that is not compressed (skipped, or at 32 bits); return the tensor to sum in its place.

        The caller sums it over ranks, and writes the mean to the gradient, or to its entry in `relocated`.
        """
        wire = gradient if gradient.is_sparse else wire_form(gradient, self._plan.transport)
        if wire is gradient and not self._in_place:
            wire = gradient.clone()
        if wire is not gradient:
            self._copied.append(gradient)
        self._plain_bytes += wire.nbytes
        self._float32_bytes += 4 * wire.numel() * (2 if wire.is_complex() else 1)
        return wire

    def reduce(self, place: str, gradients: Mapping[str, torch.Tensor]) -> None:
        """Sum gradients that are not compressed, and write their means. Does not block.

        Args:
            place: a name for this group of gradients, equal on all ranks.
            gradients: by parameter's name, in the same order on all ranks: dense ones, or a single sparse one.
        """
        wires = {
            name: gradient if gradient.is_sparse else self.uncompressed(gradient)
            for name, gradient in gradients.items()
        }
        with self._lock:
            self._sums += sums_of(self._plan.source, place, wires, gradients)
            self._keep_order()
            self._poll()

    def await_agreement(self) -> None:
        """Block until all ranks have agreed on this step.

        Raises:
            LockstepError: they disagree.
        """
        with self._lock:
            self._agree_now()
            self._poll()  # the caller may wait for something else next

    def collect(self) -> None:
        """Block until all gradients are means. Call it when every gradient has been added, so that every wait ends.

        Raises:
            LockstepError: the ranks differ in level, step or parameters.
        """
        with self._lock:
            try:
                clocks = [clock for streams in self._streams if (clock := streams.behind()) is not None]
                # First of all: ranks that disagree wait for exchanges that never come.
                self._agree_now()
                self._complete()
                self.traffic.waited_seconds += self._waited(clocks)
                self.over = True
            finally:
                self._synchronize()

    def _waited(self, clocks: Sequence[Callable[[], float]]) -> float:
        """For how many seconds the program could not go on, because of messages; `clocks`: of GPUs."""
        if clocks:  # the host's own waits are for backward's kernels, too
            return max(clock() for clock in clocks)
        tasks: list[Task] = [self._agreement, *self._exchanges, *self._sums]
        return sum(task.waited for task in tasks)

    @property
    def refused(self) -> bool:
        """Whether the ranks disagree, which all of them know."""
        # From the greetings themselves, not because an error ended the wait for them.
        return isinstance(self._agreement.error, LockstepError) and self._agreement.handle is None

    def abandon(self) -> None:
        """Stop the background work after an error: gradients are neither read nor written from now on."""
        with self._lock:
            self._abandoned = True
            self._synchronize()

    @property
    def _streams(self) -> set[Streams]:
        """The streams that may hold work of this step."""
        return {*(bucket.streams for bucket in self._buckets), *(task.streams for task in self._sums)}

    def _synchronize(self) -> None:
        for streams in self._streams:
            streams.synchronize()

    @marked("agree")
    def _agree_now(self) -> None:
        self._agreement.outcome()

    def _poll(self) -> None:
        if self._is_first() and self._agreement.advance() and self._agreement.error is None:
            under_way = []
            for exchange in self._under_way:
                if not exchange.advance():
                    under_way.append(exchange)
                exchange.raise_error()
            self._under_way = under_way
            for task in self._sums:
                task.advance()
                task.raise_error()
            self.in_flight = True

    def _is_first(self) -> bool:
        """Whether every earlier step has been agreed on and sent."""
        if self._after is not None and self._after.in_flight:
            self._after = None  # a reference would keep the whole chain of earlier steps alive
        return self._after is None

    def _in_background(self) -> bool:
        """Advance without blocking, unless the program's thread does so now; return whether the step is over."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # The task keeps an error, and the program's thread raises it. As there, autograd records nothing.
            with contextlib.suppress(Exception), torch.no_grad():
                if not (self.over or self._abandoned):
                    self._poll()
            return self.over or self._abandoned
        finally:
            self._lock.release()

    def _complete(self) -> None:
        self._drain()
        for task in self._sums:
            task.start()
        for task in self._sums:
            task.outcome()
        for streams in self._streams:
            streams.catch_up()
        for exchange in self._exchanges:
            exchange.conclude()
            exchange.raise_error()
        self._count()
        if self._delivers:
            for bucket in self._buckets:
                bucket.residuals.drop()

    def _launch_rest(self) -> None:
        """Start complete exchanges in order, then the others, with zeros for missing gradients."""
        self._under_way = list(dict.fromkeys([*self._under_way, *self._exchanges]))
        for exchange in self._under_way:
            exchange.start()
            if self._in_order:
                exchange.advance()
            exchange.raise_error()
        self.in_flight = True

    def _drain(self) -> None:
        self._launch_rest()
        # Every rank waits for the least advanced exchange first. So no two ranks wait for each other, and one bucket is
        # summed while another one is in transit.
        while under_way := [exchange for exchange in self._exchanges if not exchange.received]:
            first = min(under_way, key=lambda exchange: exchange.collectives)
            first.wait()
            first.raise_error()
            self._poll()
        self._relocate_shared()
        for exchange in self._exchanges:
            exchange.write()
            exchange.raise_error()

    def _relocate_shared(self) -> None:
        """Copy each gradient that overlaps another one in memory, so that both means have a place.

        On another rank the two gradients, and so the two means, may differ. Means that are already written overlap
        nothing.
        """
        if self._plan.source.own_memory:
            return
        waiting = [exchange for exchange in self._exchanges if not exchange.over]
        written = [each for exchange in waiting for each in exchange.gradients if each is not None] + self._copied
        self.relocated = {id(written[i]): written[i].clone() for i in overlapping(written)}
        for exchange in waiting:
            exchange.relocate(self.relocated)

    def _count(self) -> None:
        ranks = self._plan.source.world_size
        self.traffic.sent_bytes += allreduce_bytes(self._plain_bytes, ranks)
        self.traffic.sent_bytes += sum(exchange.sent_bytes for exchange in self._exchanges)
        self.traffic.float32_bytes += allreduce_bytes(self._float32_bytes, ranks)
