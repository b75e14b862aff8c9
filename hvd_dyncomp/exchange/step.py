"""Everything that one training step has in flight."""

from __future__ import annotations

import logging
import threading

import torch

from hvd_dyncomp.exchange.agreement import Agreement
from hvd_dyncomp.exchange.intake import Intake, Taken
from hvd_dyncomp.exchange.one_bucket import Exchange
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.tally import Tally
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.uncompressed import reduce_uncompressed
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.exchange.unused import unused
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter, Traffic
from hvd_dyncomp.step_levels import Turn
from hvd_dyncomp.transport.base import in_background

logger = logging.getLogger(__name__)


class Step:
    """The gradients of one step, from the first `compress` to the last `decompress`.

    An interruption before `start` leaves the step not begun.

    Whatever does not have to wait is also done in the background: what other ranks wait for must go out while this rank
    is busy with something else, such as another optimizer's step.

    Args:
        plan: the buckets.
        turn: number, level and epoch; later changes of the controller concern the next step.
        stochastic: round values stochastically instead of to nearest.
        fresh: whether backward has run since the last exchange.
        meter: counts the bytes.
        previous: a step that was given up: nothing is sent while anything of it is in flight.

    Attributes:
        number, bits: of the turn.
        intake: the gradients that have arrived.
        proposal: rank 0's, once `collect` has been called.
        over: whether `collect` has been called.
        overwritten: whether the means replace changes that the program made to this rank's gradients. Known when
            `collect` is over.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        turn: Turn,
        stochastic: bool,
        fresh: bool,
        meter: Meter,
        previous: Step | None = None,
    ) -> None:
        number, bits, _, epoch = turn
        self._plan, self.bits, self.number, self._fresh = plan, bits, number, fresh
        self._tally = Tally(plan, meter, epoch=epoch, bits=bits)
        self.proposal: float = 0
        self.over = self.overwritten = self._abandoned = self._given_up = False
        self._lock = threading.Lock()  # between the program and what is done in the background
        self._exchanges: list[Exchange] = []
        self._agreement = Agreement(plan, turn, fresh=fresh, previous=previous)
        self._streams = {bucket.streams for bucket in plan.buckets}
        for bucket in plan.buckets if plan.settings.discardable else ():
            with bucket.streams.outgoing([bucket.streams.origin()]):  # as what changes them
                bucket.residuals.remember()
        if bits == UNCOMPRESSED:
            for bucket in plan.buckets:
                bucket.residuals.release()
        else:
            for bucket in plan.buckets:
                exchange = Exchange(
                    bucket,
                    bits=bits,
                    step=number,
                    factor=plan.source.factor,
                    stochastic=stochastic,
                    transport=plan.transport,
                    own_memory=plan.source.own_memory,
                )
                self._exchanges.append(exchange)
                self._tally.compresses(bucket)
        # What is not compressed is reduced in its place, as without this package, unless a compressed gradient or
        # something that waits in a residual may be in the same memory.
        waits = any(bucket.residuals.releases for bucket in plan.buckets)
        in_place = plan.source.own_memory or (bits == UNCOMPRESSED and not waits)
        self.intake = Intake(plan, self._tally, fresh=fresh, in_place=in_place)
        self._unused: Task[list[Slot]] | None = None  # the parameters that no rank uses
        self._under_way = list(self._exchanges)
        self._again: list[Task[dict[str, int]]] = []

    def start(self) -> None:
        """Greet the other ranks. From here on, whatever can be done without waiting is done in the background."""
        with self._lock:
            self._agreement.greet(wait=False)
        in_background(self._plan.transport, self._in_background)

    @property
    def traffic(self) -> Traffic:
        """What this rank has sent in the step's epoch at its level."""
        return self._tally.traffic

    @property
    def fresh(self) -> bool:
        """Whether backward has made any of the gradients, on any rank. Known when `collect` is over."""
        return self._agreement.fresh

    @property
    def assigned(self) -> bool:
        """Whether this rank had gradients that would travel compressed if a backward pass had made them."""
        return self.intake.in_use and not self.fresh

    def take(self, gradient: torch.Tensor, name: str, parameter: torch.Tensor) -> Taken:
        """Take a parameter's gradient. If interrupted, call it again."""
        slot = self._plan.slots.get(name)
        if slot is None or self.bits == UNCOMPRESSED:
            return self.intake.uncompressed(gradient, name, slot)
        taken = self.intake.compressed(gradient, name, parameter)
        exchange = self._exchanges[slot.bucket]
        with self._lock:
            exchange.add(slot, taken.gradient, used=self.intake.used[name] is True)
            ready = exchange.complete or self._ready
        if ready:
            uninterrupted(lambda: self._go_on(exchange))
        if exchange.complete and not gradient.is_cuda:  # with a GPU, the core is idle anyway
            self._plan.transport.give_way()
        return taken

    def _go_on(self, exchange: Exchange) -> None:
        with self._lock:
            # If no gradient is fresh here, perhaps none is on any rank: then there is nothing to quantize. And before
            # the first handshake it is unknown which rank quantizes what.
            if exchange.complete and self._fresh and self._plan.topology_checksum:
                exchange.prepare()
            self._advance()

    @property
    def _ready(self) -> bool:
        """Whether `_advance` would do something."""
        if not self._agreement.reached:
            return self._agreement.ready
        return self.fresh and any(exchange.ready for exchange in self._under_way)

    def check(self) -> None:
        """Block until all ranks are known to do the same in this step.

        Raises:
            LockstepError: they do not.
            ValueError: a message would be too long.
        """
        with self._lock:
            self._agreement.reach()
            self._advance()  # Horovod waits for its own next

    def collect(self) -> None:
        """End all exchanges. Called when every gradient of the step is in, so that every wait ends.

        Raises:
            LockstepError: the ranks differ in level, step or parameters.
            ValueError: a message would be too long.
        """
        with self._lock:
            self.over, self.overwritten = True, self.intake.changed
            try:
                # First of all: ranks that disagree wait for exchanges that never come.
                self._agreement.reach()
                self.proposal = self._agreement.proposal
                tickets = sum(taken.compressed for taken in self.intake.taken.values())
                self._tally.reduced(tickets * self._plan.ticket_bytes)
                if self.fresh:
                    self._finish()
                else:
                    self._finish_uncompressed()
            finally:
                self._join()

    def memory(self, gradient: torch.Tensor) -> torch.Tensor:
        """Where the mean of a gradient is: in its place, unless another gradient's mean is there."""
        return self.intake.apart.get(id(gradient), gradient)

    def leave(self, gradient: torch.Tensor) -> None:
        """No rank has used the parameter of this gradient: its mean is zero, and its residual is as before the step."""
        self.memory(gradient).zero_()
        slot = self.intake.slot_of(gradient)
        if self._exchanges:
            self._exchanges[slot.bucket].leave(slot)

    def abandon(self) -> None:
        """Stop all background work. The optimizer may still collect the step."""
        with self._lock:
            self._abandoned = True
            self._join()

    def give_up(self) -> None:
        """Give up: nobody will collect the step. What others wait for, or an abort, goes out in the background."""
        with self._lock:
            self._given_up = True
            tasks: list[Task] = [*self._exchanges, *self._again]
            for task in tasks:
                task.cancel(_given_up())
        in_background(self._plan.transport, self._in_background)

    def drained(self, *, wait: bool = False) -> bool:
        """Whether nothing of a given-up step is in flight.

        Args:
            wait: block until that is so.
        """
        with self._lock:
            return self._drained(wait)

    def _drained(self, wait: bool) -> bool:
        try:
            return self._drain(wait)
        except Exception:  # noqa: BLE001  # nobody wants the result; the next step names any disagreement
            return True

    def _drain(self, wait: bool) -> bool:
        if not self._agreement.greet(wait=wait):
            return False
        if wait:
            self._agreement.reach()
        else:
            self._advance()
        if not self._agreement.reached:
            return self._agreement.failed
        tasks: list[Task] = [*self._sum_tickets(), *self._exchanges] if self.fresh else [*self._reduce_again()]
        if self.fresh and wait:
            self._exchange()
        elif self.fresh:
            for exchange in self._exchanges:
                exchange.start()
        for task in tasks:
            while wait and not task.done:
                task.wait()
        return all([task.advance() for task in tasks])  # a list: each goes on

    def _join(self) -> None:
        for streams in self._streams:
            streams.join()

    def _set_apart(self) -> None:
        """Before means are written that could not be before: see `Intake.set_apart`."""
        if not self._plan.source.own_memory:
            waiting = [exchange for exchange in self._exchanges if not exchange.over]
            self.intake.set_apart([each for exchange in waiting for each in exchange.gradients if each is not None])
            for exchange in waiting:
                exchange.set_apart(self.intake.apart)

    def _exchange(self) -> None:
        for exchange in self._exchanges:
            exchange.start()
        # Every exchange sends all that others wait for, even after an error in another one. All ranks wait for the
        # least advanced one first: so no two wait for each other, and one bucket is summed while another's values
        # travel.
        while under_way := [exchange for exchange in self._exchanges if not exchange.received]:
            min(under_way, key=lambda exchange: exchange.collectives).wait()
            self._advance()
        self._set_apart()
        for exchange in self._exchanges:
            exchange.write()

    def _finish(self) -> None:
        tickets = self._sum_tickets()
        self._exchange()
        left = [slot for task in tickets for slot in task.outcome()]
        for streams in self._streams:
            streams.catch_up()
        for exchange in self._exchanges:
            exchange.conclude()
            if exchange.error is not None:
                raise exchange.error
        for slot in left:
            self.leave(self.intake.taken[slot.name].gradient)
        self._tally.shook_hands(self._agreement.nbytes, compressed=self.bits != UNCOMPRESSED)
        if self.bits == UNCOMPRESSED:
            for bucket in self._plan.buckets:
                bucket.residuals.released(self._fresh)
            return
        for bucket, exchange in zip(self._plan.buckets, self._exchanges, strict=True):
            self._tally.exchanged(bucket, exchange.groups)
        self._note_nonfinite(sum(exchange.nonfinite_blocks for exchange in self._exchanges))

    def _finish_uncompressed(self) -> None:
        """Reduce gradients that no rank's backward has made, as they are (`exchange.uncompressed`)."""
        self._set_apart()
        again = self._reduce_again()
        bytes_by_name = {name: nbytes for task in again for name, nbytes in task.outcome().items()}
        self._tally.reduced_again(bytes_by_name, self._agreement.nbytes)

    def _sum_tickets(self) -> list[Task[list[Slot]]]:
        """Ask which parameters no rank uses, if that may be any and the source of gradients does not tell."""
        if not self._exchanges or not self._plan.source.sums_tickets:
            return []
        if self._unused is None:
            transport, name = self._plan.transport, f"hvd_dyncomp.{self._plan.source.label}.tickets"
            self._unused = Task(transport, unused(transport, name, self._plan.slots, self.intake.used))
            self._unused.begin()
        return [self._unused]

    def _reduce_again(self) -> list[Task[dict[str, int]]]:
        if not self._again:
            factor, transport = self._plan.source.factor, self._plan.transport
            for bucket, exchange in zip(self._plan.buckets, self._exchanges, strict=False):
                self._again.append(Task(transport, reduce_uncompressed(bucket, exchange.gradients, factor, transport)))
                self._again[-1].begin()
                if self._given_up:
                    self._again[-1].cancel(_given_up())
        return self._again

    def _in_background(self) -> bool:
        """Do what is possible without waiting, unless the program does so itself; return whether the step is over."""
        if self._lock.acquire(blocking=False):
            try:
                if self._given_up:
                    return self._drained(wait=False)
                if not (self.over or self._abandoned):
                    self._advance()
                return self.over or self._abandoned
            finally:
                self._lock.release()
        return False

    def _advance(self) -> None:
        if self._agreement.advance() and self.fresh:
            self._under_way = [exchange for exchange in self._under_way if not exchange.advance()]

    def _note_nonfinite(self, blocks: int) -> None:
        """Count blocks that are not finite; log the first ones of each meter record, that is of epoch and level."""
        if blocks and not self.traffic.nonfinite_blocks:
            logger.warning(
                "step %d: NaN or infinity in %d blocks of gradients, which reach every rank as NaN; further ones in "
                "this epoch are only counted in the meter (nonfinite_blocks)",
                self.number,
                blocks,
            )
        self.traffic.nonfinite_blocks += blocks


def _given_up() -> RuntimeError:
    return RuntimeError("this rank has given up the step")
