"""One step: from its first gradient until all gradients are means."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.handshake import flags_of, handshake
from hvd_dyncomp.exchange.memory import overlapping
from hvd_dyncomp.exchange.one_bucket import Exchange
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.streams import Streams
from hvd_dyncomp.exchange.sums import Sums, wire_form
from hvd_dyncomp.exchange.tally import Tally, float32_bytes
from hvd_dyncomp.exchange.task import Collectives, Task
from hvd_dyncomp.exchange.wire import GREETING_BYTES, Flag
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.ranges import marked
from hvd_dyncomp.step_levels import Turn
from hvd_dyncomp.transport.base import in_background

logger = logging.getLogger(__name__)


class Step:
    """The gradients of one step. A front end makes it, starts it, hands over every gradient and collects it.

    What does not have to wait is also done in the background: what other ranks wait for must go out while this rank is
    busy with something else, such as another optimizer's step. If anything is raised in between, the step must be
    abandoned: gradients and residuals may be half done.

    Args:
        plan: the buckets.
        turn: number, level and epoch; later changes of the controller concern the next step.
        stochastic: round values stochastically instead of to nearest.
        fresh: whether backward has run on this rank since the last exchange.
        meter: counts the bytes.
        absent: names of parameters that have no gradient in this step, the same on all ranks: none is written then.
        agreed: what else must be the same on all ranks in this step: plain data, by names that errors use.
        buckets: those of the plan that travel in this step, the same on all ranks; None for all.
        after: a step that is in flight, too. This one greets when that one has sent what it has: if the ranks do not
            agree on that one, nothing of this one may be under way.

    Attributes:
        number, bits: of the turn.
        traffic: what this rank has sent in the step's epoch at its level.
        fresh: whether backward has made any of the gradients, on any rank. Known when `collect` is over.
        proposal: rank 0's proposed level. Likewise.
        anew: whether it is the first step of any rank's plan. Known when `check` is over.
        apart: likewise: by identity of a gradient whose mean is not in its place, because another gradient's is there:
            the tensor that has the mean.
        over: whether every gradient is a mean.
        started: whether all ranks agree, and what was handed over is on its way.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        turn: Turn,
        stochastic: bool,
        fresh: bool,
        meter: Meter,
        absent: Collection[str] = (),
        agreed: Mapping[str, Any] | None = None,
        buckets: Sequence[Bucket] | None = None,
        after: Step | None = None,
    ) -> None:
        self._plan, self._fresh, self._absent, self._agreed = plan, fresh, absent, agreed or {}
        self._buckets = plan.buckets if buckets is None else buckets
        self._after, self.started = after, False
        self.number, self.bits = turn.number, turn.bits
        self._tally = Tally(plan, meter, epoch=turn.epoch, bits=turn.bits)
        self.traffic = self._tally.traffic
        self.proposal: float = 0
        self.apart: dict[int, torch.Tensor] = {}
        self.fresh = self.anew = self.over = self._abandoned = False
        self._lock = threading.Lock()  # between the program and what is done in the background
        self._copied: list[torch.Tensor] = []  # gradients of which a copy travels uncompressed
        self._origins = {bucket.streams: bucket.streams.origin() for bucket in self._buckets}
        self._in_order = plan.transport.in_order and any(bucket.streams.late for bucket in self._buckets)
        self._agreement: Task[None] = Task(plan.transport, self._agree(turn))
        for bucket in self._buckets if plan.settings.discardable else ():
            with bucket.streams.outgoing([bucket.streams.origin()]):  # as what changes them
                bucket.residuals.remember()
        self._exchanges: list[Exchange] = []
        self._sums = Sums(plan.transport, plan.source.label, plan.source.factor)
        if turn.bits == UNCOMPRESSED:
            for bucket in self._buckets:
                bucket.residuals.release()
            for slot in filter(None, map(plan.slots.get, absent)):
                plan.buckets[slot.bucket].residuals.join(slot, torch.zeros(1, device="cpu"))  # zeros: it waits
        else:
            plan.arrange(self._origins)
            self._tally.compresses(self._buckets)
            self._exchanges = self._new_exchanges(stochastic=stochastic)
        # In the order in which they were complete: with DDP, and in `Averager`, the same on all ranks.
        self._under_way = [exchange for exchange in self._exchanges if exchange.complete]
        # What is not compressed is reduced in its place, as without this package, unless a compressed gradient or
        # something that waits in a residual may be in the same memory.
        waits = any(bucket.residuals.releases for bucket in self._buckets)
        self._in_place = plan.source.own_memory or (turn.bits == UNCOMPRESSED and not waits)

    def _new_exchanges(self, *, stochastic: bool) -> list[Exchange]:
        """Exchanges of all buckets, with zeros for parameters that have no gradient."""
        source = self._plan.source
        exchanges = [
            Exchange(
                bucket,
                bits=self.bits,
                step=self.number,
                factor=source.factor,
                stochastic=stochastic,
                transport=source.transport,
                own_memory=source.own_memory,
            )
            for bucket in self._buckets
        ]
        self._exchange_of = {bucket.number: one for bucket, one in zip(self._buckets, exchanges, strict=True)}
        for slot in filter(None, map(self._plan.slots.get, self._absent)):
            self._exchange_of[slot.bucket].add(slot, None, used=False)
        return exchanges

    def start(self) -> None:
        """Greet the other ranks. From here on, whatever can be done without waiting is done in the background."""
        with self._lock:
            if self._is_first():
                self._agreement.begin()
        in_background(self._plan.transport, self._in_background)

    def add(self, slot: Slot, gradient: torch.Tensor, used: bool = True, lingers: bool = False) -> None:
        """Take a gradient that travels compressed: that of a slot, in a step below 32 bits. Does not block.

        Args:
            used: whether this rank's loss depends on the parameter. If not, it may be that no rank's does: then the
                gradient keeps what it has of earlier steps, and the residual stays.
            lingers: whether the gradient may have values of earlier steps.
        """
        exchange = self._exchange_of[slot.bucket]
        exchange.add(slot, gradient, used=used, lingers=lingers)
        if exchange.complete and not exchange.queued:
            self._go_on(exchange)
            # After the last one the program will wait soon, and with a GPU the core is idle anyway.
            if not (gradient.is_cuda or all(exchange.complete for exchange in self._exchanges)):
                self._plan.transport.give_way()

    def _go_on(self, exchange: Exchange) -> None:
        with self._lock:
            self._under_way.append(exchange)
            exchange.queued = True  # not before: if this is interrupted, it is added again
            # If no gradient is fresh here, perhaps none is on any rank: then there is nothing to quantize. And before
            # the first handshake it is unknown which rank quantizes what.
            if self._fresh and self._plan.topology_checksum:
                exchange.prepare()
            self._keep_order()
            self._advance()

    def _keep_order(self) -> None:
        """Greetings arrive at another time on each rank: if the order of all counts, nothing may begin just then.

        Behind a step that was refused nothing begins, and no greeting is sent: the other ranks send none either.
        """
        while self._in_order and self._is_first() and not self._agreement.done:  # this waits for no GPU
            self._agreement.wait()

    def uncompressed(self, name: str, gradient: torch.Tensor, used: bool = True) -> torch.Tensor:
        """Take a gradient that is skipped, or at 32 bits; return what travels in its place, with what its residual had.

        The caller sums it over ranks, and writes the mean to the gradient's place (`apart`).

        Args:
            used: as in `add`.
        """
        wire, slot = self._wire_form(name, gradient), self._plan.slots.get(name)
        # A gradient that is not fresh was reduced before, with its residual.
        if slot is not None and self._fresh:
            wire = self._plan.buckets[slot.bucket].residuals.join(slot, wire, used)
        if wire is gradient and not self._in_place:
            wire = gradient.clone()
        if wire is not gradient:
            self._copied.append(gradient)
        self._tally.hands_over(wire.nbytes, float32_bytes(wire))
        return wire

    def reduce(self, place: str, gradients: Mapping[str, torch.Tensor], unused: Collection[str] = ()) -> None:
        """Take gradients that travel uncompressed, as `uncompressed` has it, and write their means. Does not block.

        Args:
            place: what they have in common, the same on all ranks.
            gradients: by parameter's name, in the same order on all ranks: dense ones, or a single sparse one.
            unused: names of those that this rank's loss does not depend on.
        """
        wires = {
            name: gradient if gradient.is_sparse else self.uncompressed(name, gradient, name not in unused)
            for name, gradient in gradients.items()
        }
        with self._lock:
            self._sums.add(place, wires, gradients)
            self._keep_order()
            self._advance()

    def _wire_form(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        wire = gradient if gradient.is_sparse else wire_form(gradient, self._plan.transport)
        half = self._plan.settings.fp16_skipped and wire.dtype is torch.float32 and name not in self._plan.slots
        return wire.half() if half else wire

    def check(self) -> None:
        """Block until all ranks are known to do the same in this step.

        Raises:
            LockstepError: they do not.
            ValueError: a message would be too long.
        """
        with self._lock:
            self._agree_now()
            self._advance()  # the caller may wait for something else next

    def collect(self) -> None:
        """End all exchanges. Called when every gradient of the step is in, so that every wait ends.

        Raises:
            LockstepError: the ranks differ in level, step or parameters.
            ValueError: a message would be too long.
        """
        with self._lock:
            try:
                # First of all: ranks that disagree wait for exchanges that never come.
                self._agree_now()
                self._finish()
                self.over = True
            finally:
                self._join()

    @property
    def refused(self) -> bool:
        """Whether the ranks do not agree: all of them know it."""
        # By their greetings: not if an error has ended the wait for these.
        return isinstance(self._agreement.error, LockstepError) and self._agreement.handle is None

    def abandon(self) -> None:
        """Stop all work in the background, after an error. Gradients are not read or written any more."""
        with self._lock:
            self._abandoned = True
            self._join()

    @property
    def _streams(self) -> set[Streams]:
        """Those in which anything of the step may be queued."""
        return {*self._origins, *(task.streams for task in self._sums.tasks)}

    def _join(self) -> None:
        for streams in self._streams:
            streams.join()

    def _agree(self, turn: Turn) -> Collectives[None]:
        """All ranks do the same in this step, or nothing is sent that fits only then."""
        plan = self._plan
        greeting = plan.greeting(turn, self._agreed, fresh=self._fresh)
        about = functools.partial(plan.about, turn.bits, turn.number, self._agreed)
        greetings = yield from handshake(plan.transport, plan.source.label, greeting, about)
        plan.settle(greetings, turn.bits, self._origins)
        self.fresh, self.proposal = bool(flags_of(greetings) & Flag.FRESH), greetings[0].proposal
        self.anew = not all(greeting.topology for greeting in greetings)

    @marked("agree")
    def _agree_now(self) -> None:
        self._agreement.outcome()

    def _advance(self) -> None:
        if self._is_first() and self._agreement.advance() and self._agreement.error is None:
            under_way = []
            for exchange in self._under_way:
                # If no gradient is fresh on any rank, `collect` takes them out.
                if not self.fresh or not exchange.advance():
                    under_way.append(exchange)
                self._raise_error_of(exchange)
            self._under_way = under_way
            for task in self._sums.tasks:
                task.advance()
                self._raise_error_of(task)
            self.started = True

    def _is_first(self) -> bool:
        """Whether there is no step before it that has yet to be agreed upon and sent."""
        if self._after is not None and self._after.started:
            self._after = None  # which would keep all that were before it
        return self._after is None

    def _in_background(self) -> bool:
        """Do what is possible without waiting, unless the program does so itself; return whether all is done."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            # Errors are the program's thread's: its task keeps them. As there, no graph is made.
            with contextlib.suppress(Exception), torch.no_grad():
                if not (self.over or self._abandoned):
                    self._advance()
            return self.over or self._abandoned
        finally:
            self._lock.release()

    def _finish(self) -> None:
        if self.fresh:
            self._exchange()
        else:
            self._reduce_again()
        self._tally.reduced()
        for task in self._sums.tasks:
            task.start()
        for task in self._sums.tasks:
            task.outcome()
        for streams in self._streams:
            streams.catch_up(self._plan.transport.check_peers)
        for exchange in self._exchanges:
            exchange.conclude()
            self._raise_error_of(exchange)
            exchange.restore_unused()
        self._count()
        if self.bits == UNCOMPRESSED and self.fresh:
            for bucket in self._buckets:
                bucket.residuals.released(self._fresh)

    def _reduce_again(self) -> None:
        """Sum gradients unchanged and without residuals in place of exchanges: no rank's backward has made them.

        `optimizer.synchronize()`, clipping, `optimizer.step()` (without `skip_synchronize`) reduces the reduced
        gradients again, with the user's changes. Horovod does so with a warning. A residual that joined them would undo
        the clipping.
        """
        self._set_apart()
        for bucket, exchange in zip(self._buckets, self._exchanges, strict=True):
            both = zip(bucket.slots, exchange.gradients, strict=True)
            # Zeros for what is missing, so that all ranks send as much.
            means = {
                slot.name: torch.zeros(slot.shape, dtype=torch.float32, device=bucket.device) if mean is None else mean
                for slot, mean in both
            }
            wires = {name: wire_form(mean, self._plan.transport) for name, mean in means.items()}
            self._tally.hands_over(sum(wire.nbytes for wire in wires.values()), 0)  # as float32 they are counted
            self._sums.add(bucket.name, wires, means)
        self._exchanges, self._under_way = [], []

    def _raise_error_of(self, task: Task) -> None:
        """Raise what has ended a task: where collectives match by their order, nothing may start behind it."""
        if task.error is not None:
            raise task.error

    def _start_all(self) -> None:
        """Start what is complete, in order, and then what is not, with zeros for what is missing."""
        self._under_way = list(dict.fromkeys([*self._under_way, *self._exchanges]))
        for exchange in self._under_way:
            exchange.start()
            if self._in_order:
                exchange.advance()
            self._raise_error_of(exchange)
        self.started = True

    def _exchange(self) -> None:
        self._start_all()
        # All ranks wait for the least advanced one first: so no two wait for each other, and one bucket is summed while
        # another's values travel.
        while under_way := [exchange for exchange in self._exchanges if not exchange.received]:
            first = min(under_way, key=lambda exchange: exchange.collectives)
            first.wait()
            self._raise_error_of(first)
            self._advance()
        self._set_apart()
        for exchange in self._exchanges:
            exchange.write()
            self._raise_error_of(exchange)

    def _set_apart(self) -> None:
        """Give memory of its own to each gradient that shares some with another one; it keeps its values.

        On another rank the two gradients may differ, and so do the two means. Means that are written already share
        nothing.
        """
        if self._plan.source.own_memory:
            return
        waiting = [exchange for exchange in self._exchanges if not exchange.over]
        written = [each for exchange in waiting for each in exchange.gradients if each is not None] + self._copied
        self.apart = {id(written[i]): written[i].clone() for i in overlapping(written)}
        for exchange in waiting:
            exchange.set_apart(self.apart)

    def _count(self) -> None:
        nbytes = GREETING_BYTES * self._plan.transport.size
        if not self.fresh:
            self._tally.count_reduced(nbytes)
            return
        self._tally.shook_hands(nbytes, compressed=self.bits != UNCOMPRESSED)
        for bucket, exchange in zip(self._buckets, self._exchanges, strict=False):
            self._tally.exchanged(bucket, exchange.groups)
        blocks = sum(exchange.nonfinite_blocks for exchange in self._exchanges)
        if blocks and not self.traffic.nonfinite_blocks:  # the first ones of each meter record
            logger.warning(
                "step %d: NaN or infinity in %d blocks of gradients, which reach every rank as NaN; further ones in "
                "this epoch are only counted in the meter (nonfinite_blocks)",
                self.number,
                blocks,
            )
        self.traffic.nonfinite_blocks += blocks
