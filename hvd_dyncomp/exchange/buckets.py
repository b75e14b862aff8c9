"""Buckets: parameters that travel together, and what is owed to them. Built once, the same on every rank."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_dyncomp.exchange.codec import Span, checksum
from hvd_dyncomp.exchange.coding import Coding
from hvd_dyncomp.exchange.settings import Skip
from hvd_dyncomp.exchange.slots import Slot, divided, runs, spans
from hvd_dyncomp.exchange.streams import streams_of
from hvd_dyncomp.exchange.topology import Arrangement, Section, Topology, flat, hierarchical
from hvd_dyncomp.kernels import bounded


class Residuals(NamedTuple):
    """What the two quantizations of a bucket have yet to deliver.

    Attributes:
        own: (values of this rank's section,) float32, of what it quantizes first: its gradient, or its host's sum.
        shard: (values of this rank's shard,) float32, of the sum over its section's ranks; empty without shards.
    """

    own: torch.Tensor
    shard: torch.Tensor


class Bucket:
    """Parameters that travel in one exchange, with what error feedback carries from step to step.

    Attributes:
        name: of its first parameter, unique among the buckets of an optimizer.
        collective: what the names of its collectives begin with; unique among the buckets of all optimizers.
        slots: its parameters, in order; small ones last.
        values: gradient values in it.
        blocks: number of blocks; the last is padded with zeros.
        streams: where the work on it is queued.
        arrangement: who reduces which blocks; flat until `arrange` is called.
        layout: checksum over parameters and block size: where which value is.
        composition: checksum over everything that the ranks must agree about: layout, world size and topology.
        residuals: what error feedback carries; None without it.
        carries: whether the residuals may be non-zero.
        failure: why it cannot take part in exchanges: it could not be arranged.
        withheld: whether, since `release_residuals`, some have waited for a gradient that takes them along.
    """

    def __init__(
        self,
        slots: list[Slot],
        *,
        block_size: int,
        rank: int,
        world_size: int,
        error_feedback: bool,
        device: torch.device,
        label: str = "",
    ) -> None:
        self.name = slots[0].name
        # The optimizer's label, too: names that are the quantizer's own may be another quantizer's as well.
        self.collective = f"hvd_dyncomp.{label}.{self.name}"
        self.slots = slots
        self._coding: tuple[float, Coding] | None = None  # the latest, and its level
        self._shares: tuple[float, dict[str, float]] | None = None  # likewise
        self.block_size, self.rank, self.world_size, self.device = block_size, rank, world_size, device
        self.streams = streams_of(device)
        self.values = slots[-1].start + slots[-1].numel
        self.blocks = -(-self.values // block_size)
        # On the CPU wherever the gradients are: Horovod is to wait for no GPU for them. And written once a gradient by
        # numpy: an operator of torch's for one value costs more than all else.
        tickets = torch.zeros(len(slots), dtype=torch.float32, device="cpu")
        self._each_ticket = list(tickets.split(1))
        self._ticket_values = tickets.numpy()
        self._content = f"{[(slot.name, slot.shape) for slot in slots]} block_size={block_size}"
        self.layout = checksum(self._content)
        self._error_feedback = error_feedback
        self.residuals: Residuals | None = None
        self.carries = self.withheld = False
        # What this rank owes outside its section, (blocks * block_size,) float32, since it was arranged anew.
        self._debts: torch.Tensor | None = None
        self.failure: Exception | None = None
        self.arrangement: Arrangement = flat(self.blocks, rank, Topology.apart(world_size))
        self.composition = self._composition(None)
        self._allocate()

    def arrange(self, topology: Topology, *, by_host: bool) -> None:
        """Divides the blocks anew. What is owed stays owed. Before anything of a step is quantized or released.

        Args:
            topology: where the ranks are.
            by_host: hierarchically, for which there must be no obstacle.
        """
        new = (hierarchical if by_host else flat)(self.blocks, self.rank, topology)
        same = new[:2] == self.arrangement[:2]
        try:
            owed = None if same or self.residuals is None or not self.carries else self._all_owed(self.residuals.shard)
        finally:  # as on the other ranks, whatever becomes of the memory here
            self.arrangement, self.composition = new, self._composition(topology if by_host else None)
        if not same:
            self._allocate()
        if owed is not None:
            self.owe(owed)

    def _composition(self, topology: Topology | None) -> int:
        note = f" hosts={topology.hosts}" if topology else ""
        return checksum(f"{self._content} world_size={self.world_size}{note}")

    def _allocate(self) -> None:
        self._debts = None
        if not self._error_feedback:
            return
        own, shard = ((values.stop - values.start) for values in (self.section_range, self.shard_range))
        self.residuals = Residuals(
            torch.zeros(own, dtype=torch.float32, device=self.device),
            torch.zeros(shard if self.section.sharded else 0, dtype=torch.float32, device=self.device),
        )
        self.streams.keep(*self.residuals)

    @property
    def section(self) -> Section:
        """What this rank takes part in reducing."""
        return self.arrangement.sections[self.arrangement.own]

    @property
    def section_range(self) -> slice:
        """Its values."""
        return self._values_of(self.section.span)

    @property
    def shard_range(self) -> slice:
        """The values of this rank's shard of it."""
        return self._values_of(self.section.shards[self.section.ranks.index(self.rank)])

    def _values_of(self, span: Span) -> slice:
        return slice(span.first * self.block_size, (span.first + span.blocks) * self.block_size)

    def coding(self, bits: float) -> Coding:
        """How its blocks are coded in a step at that level."""
        if self._coding is None or self._coding[0] != bits:
            self._coding = bits, Coding(runs(self.slots, bits, self.block_size), self.block_size)
        return self._coding[1]

    def shares(self, bits: float) -> dict[str, float]:
        """What part of its codes is each tensor's (`Slot.counted_as`), by name, in a step at that level.

        A block of two counts for both.
        """
        if self._shares is None or self._shares[0] != bits:
            coding = self.coding(bits)
            lengths = {name: coding.nbytes(span) for name, span in spans(self.slots, self.block_size).items()}
            whole = sum(lengths.values())
            self._shares = bits, {name: length / whole for name, length in lengths.items()}
        return self._shares[1]

    def owed(self) -> torch.Tensor:
        """(blocks * block_size,) float32: all that this rank owes, but for its shard. May be `residuals.own` itself."""
        residuals: Residuals = self.residuals  # type: ignore[assignment]  # asked with error feedback only
        if not self.arrangement.hierarchical:
            return residuals.own
        size = self.blocks * self.block_size
        if self._debts is None:
            owed = torch.zeros(size, dtype=torch.float32, device=self.device)
        else:
            owed = self._debts.clone()
        owed[self.section_range] += residuals.own
        return owed

    def _all_owed(self, shard: torch.Tensor) -> torch.Tensor:
        owed = self.owed()
        if self.section.sharded:
            # Part of the sum over ranks: delivered once, by its owner, it arrives once.
            owed[self.shard_range] += shard
        return owed

    def owe(self, owed: torch.Tensor) -> None:
        """Puts what `owed` returned in place of all that this rank owes, but for its shard."""
        residuals: Residuals = self.residuals  # type: ignore[assignment]  # called with error feedback only
        residuals.own.copy_(owed[self.section_range])
        self._debts = None
        if self.arrangement.hierarchical:
            rest = owed.clone()
            rest[self.section_range] = 0
            self._debts = rest if rest.any() else None

    def ticket(self, slot: Slot, in_use: bool, device: torch.device | None = None) -> torch.Tensor:
        """What Horovod reduces in a gradient's place: 1 if there is a gradient and 0 if there is none; (1,) float32.

        Args:
            device: where it is; None for main memory.
        """
        if device is not None and device.type != "cpu":
            return torch.full((1,), float(in_use), dtype=torch.float32, device=device)
        self._ticket_values[slot.index] = in_use
        return self._each_ticket[slot.index]

    def keep_residuals(self) -> None:
        """To be called when a quantization has written `residuals.own`."""
        if self.residuals is not None:
            self.carries = True

    def release_residuals(self) -> None:
        """Gathers all that is undelivered where `with_residual` hands it out."""
        self.withheld = False
        if self.residuals is None or not self.carries:
            return
        own, shard = self.residuals
        self._debts = self._all_owed(shard)  # in the flat arrangement, the residual itself
        shard.zero_()
        if self.arrangement.hierarchical:
            own.zero_()

    @property
    def releases(self) -> bool:
        """Whether `with_residual` may change what is owed."""
        return self._debts is not None

    def with_residual(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient plus what is owed to it, in the gradient's dtype; that is then zero here.

        As where it is quantized, a gradient of zeros, or one that is not finite, takes nothing along.
        """
        if self._debts is None:
            return gradient
        owed = self._debts[slot.range].view(slot.shape)
        if not owed.any():
            return gradient
        largest = float(gradient.abs().max())
        if not 0 < largest < float("inf"):
            self.withheld = True
            return gradient
        total = gradient + bounded(owed, gradient)
        owed.zero_()
        if gradient.dtype is torch.float16:
            limits = torch.finfo(torch.float16)
            total = total.clamp_(limits.min, limits.max)
        return total.to(gradient.dtype)

    def released(self, fresh: bool) -> None:
        """To be called at the end of a step that has sent what `with_residual` returned; `fresh`: it was called."""
        self.carries = self.withheld or (self.carries and not fresh)
        if self.carries and self.arrangement.hierarchical:
            self.owe(self.owed())  # as it would be if it was saved and loaded
        else:
            self._debts = None

    def with_debts(self, values: list[torch.Tensor]) -> list[torch.Tensor]:
        """The values of all slots with what is owed outside this rank's section, which is then zero here."""
        if self._debts is None:
            return values
        self.withheld = False
        total = [self.with_residual(slot, value) for slot, value in zip(self.slots, values, strict=True)]
        if not self.withheld:
            self._debts = None
        return total

    def drop_residuals(self) -> None:
        """Owes nothing any more."""
        if self.residuals is not None:
            self.residuals.own.zero_()
            self.residuals.shard.zero_()
        self._debts, self.carries = None, False


def make_buckets(
    parameters: list[tuple[str, torch.Tensor]],
    *,
    min_numel: int,
    bucket_bytes: int,
    skip: Skip | None = None,
    **common,
) -> tuple[list[Bucket], dict[str, Slot]]:
    """Fills buckets with parameters, last parameter first: backward produces gradients roughly in that order.

    Complex parameters, and those that `skip` says, stay out. A bucket ends when another parameter would take it over
    `bucket_bytes` bytes of float32, or when the device changes; a parameter is never divided.

    Args:
        parameters: (unique name, parameter), in the same order on every rank.
        min_numel: parameters of fewer values are small, and last in their bucket.
        skip: says of a name and a parameter that it is to stay out.
        common: passed to every `Bucket`.

    Returns:
        The buckets, and the slots by name.
    """
    groups = divided(parameters, min_numel, bucket_bytes, skip)
    buckets = [Bucket(slots, device=device, **common) for device, slots in groups]
    return buckets, {slot.name: slot for bucket in buckets for slot in bucket.slots}
