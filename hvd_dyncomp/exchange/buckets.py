"""Buckets: groups of parameters that are exchanged together, and the division of their blocks among ranks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping

import torch

from hvd_dyncomp.exchange.coding import Coding, Span
from hvd_dyncomp.exchange.residuals import Residuals
from hvd_dyncomp.exchange.settings import Skip
from hvd_dyncomp.exchange.slots import Slot, divided, runs_of
from hvd_dyncomp.exchange.streams import streams_of
from hvd_dyncomp.exchange.topology import Arrangement, Section, Topology, flat, hierarchical


class Bucket:
    """Parameters that are exchanged together. Made once, and equal on all ranks.

    Attributes:
        number: its index in the plan, as in `Slot.bucket`.
        name: the name of its first parameter, unique among the buckets of an optimizer.
        collective: prefix of the names of its collectives, unique among the buckets of all optimizers.
        slots: the slots of its parameters, in order; small ones last.
        starts: the place of each slot's first value.
        runs: `slots.runs_of` them.
        values: number of gradient values.
        blocks: number of blocks; the last of each run is padded with zeros.
        streams: the streams in which its work is queued.
        arrangement: which rank reduces which blocks.
        residuals: of error feedback.
    """

    def __init__(
        self,
        slots: list[Slot],
        *,
        block_size: int,
        rank: int,
        topology: Topology,
        by_host: bool = False,
        error_feedback: bool,
        device: torch.device,
        label: str = "",
    ) -> None:
        self.number, self.name = slots[0].bucket, slots[0].name
        # The optimizer's label, too: names that are the quantizer's own may be another quantizer's as well.
        self.collective = f"hvd_dyncomp.{label}.{self.name}"
        self.slots = slots
        self._coding: tuple[float, Coding] | None = None  # the latest, and its level
        self.block_size, self.rank, self.device = block_size, rank, device
        self.streams = streams_of(device)
        self.starts, self.runs = [slot.start for slot in slots], runs_of(slots, block_size)
        self.values = sum(slot.numel for slot in slots)
        self.blocks = -(-self.runs[-1].end // block_size)
        self.arrangement: Arrangement = (hierarchical if by_host else flat)(self.blocks, rank, topology)
        section = self.section
        shard = section.shards[section.ranks.index(rank)] if section.sharded else Span(section.first, 0)
        own, summed = (slice(s.first * block_size, (s.first + s.blocks) * block_size) for s in (section.span, shard))
        self.residuals = Residuals(own, summed, device, enabled=error_feedback)

    @property
    def section(self) -> Section:
        """The section that this rank helps to reduce."""
        return self.arrangement.sections[self.arrangement.own]

    def coding(self, bits: float) -> Coding:
        """The coding of its blocks in a step at that level."""
        if self._coding is None or self._coding[0] != bits:
            self._coding = bits, Coding(bits, self.runs, self.block_size)
        return self._coding[1]

    def parts(self, span: Span) -> Iterator[tuple[Slot, int, int]]:
        """The slots with values in a span of blocks, each with the bucket's places from which to which these are."""
        first, last = span.first * self.block_size, (span.first + span.blocks) * self.block_size
        at = max(bisect.bisect_right(self.starts, first) - 1, 0)
        for slot in itertools.islice(self.slots, at, None):
            if slot.start >= last:
                return
            begin, end = max(first, slot.start), min(last, slot.start + slot.numel)
            if begin < end:
                yield slot, begin, end


def make_buckets(
    parameters: list[tuple[str, torch.Tensor]],
    *,
    min_numel: int,
    bucket_bytes: int,
    block_size: int,
    skip: Skip | None = None,
    as_in_memory: bool = False,
    parts: Mapping[str, str] | None = None,
    **common,
) -> tuple[list[Bucket], dict[str, Slot]]:
    """Fill buckets with parameters, last parameter first: backward makes gradients roughly in that order.

    Complex parameters and skipped ones stay out. A bucket ends when the next parameter would take it over
    `bucket_bytes` bytes of float32, or when the device or the part changes. A parameter is never split.

    Args:
        parameters: (unique name, parameter), in the same order on every rank.
        min_numel: parameters of fewer values are small, and last in their bucket.
        bucket_bytes: float32 bytes of a bucket.
        block_size: values per block.
        skip: function of a name and a parameter; True keeps the parameter out.
        as_in_memory, parts: see `Source`.
        common: passed to every `Bucket`.

    Returns:
        The buckets, and the slots by name.
    """
    groups = divided(parameters, min_numel, bucket_bytes, block_size, skip, as_in_memory, parts)
    buckets = [Bucket(slots, block_size=block_size, device=device, **common) for device, slots in groups]
    return buckets, {slot.name: slot for bucket in buckets for slot in bucket.slots}
