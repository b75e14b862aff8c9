"""Where the values of parameters are within buckets, and what of them has a level of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hvd_dyncomp.exchange.coding import Run
from hvd_dyncomp.exchange.settings import Skip
from hvd_dyncomp.levels import check_level

# What is small has no fewer bits: biases, norms. They cost next to nothing, and float32 would cost more than all else.
SMALL_BITS = 8


@dataclass(frozen=True)
class Slot:
    """A parameter's place: the `index`-th of bucket `bucket`, with its values `start` to `start + numel`."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    index: int
    start: int
    numel: int

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.numel)


class Unit(NamedTuple):
    """Values of a bucket that have one level: a large tensor, or all that are small.

    Attributes:
        name: of its first parameter.
        start, numel: its values within the bucket.
        small: whether it is all that are small.
    """

    name: str
    start: int
    numel: int
    small: bool

    def blocks(self, block_size: int) -> slice:
        """The blocks that have values of it; the first and the last may have others' as well."""
        return slice(self.start // block_size, -(-(self.start + self.numel) // block_size))

    def size(self, block_size: int) -> int:
        """The values of these blocks."""
        blocks = self.blocks(block_size)
        return (blocks.stop - blocks.start) * block_size


def divided(
    parameters: list[tuple[str, torch.Tensor]], min_numel: int, bucket_bytes: int, skip: Skip | None
) -> list[tuple[torch.device, list[Slot]]]:
    """The places of all parameters, by bucket, and each bucket's device; `buckets.make_buckets` has the arguments."""
    groups: list[tuple[torch.device, list[tuple[str, torch.Tensor]]]] = []
    nbytes = 0
    for name, parameter in reversed(parameters):
        if not parameter.numel() or not parameter.is_floating_point() or (skip is not None and skip(name, parameter)):
            continue
        nbytes += 4 * parameter.numel()
        if not groups or groups[-1][0] != parameter.device or nbytes > bucket_bytes:
            groups.append((parameter.device, []))
            nbytes = 4 * parameter.numel()
        groups[-1][1].append((name, parameter))
    return [(device, _slots(members, number, min_numel)) for number, (device, members) in enumerate(groups)]


def _slots(members: list[tuple[str, torch.Tensor]], bucket: int, min_numel: int) -> list[Slot]:
    """Their places, one after the other, small ones last."""
    slots: list[Slot] = []
    start = 0
    for name, parameter in sorted(members, key=lambda member: member[1].numel() < min_numel):
        slots.append(Slot(name, tuple(parameter.shape), bucket, len(slots), start, parameter.numel()))
        start += parameter.numel()
    return slots


def units(slots: list[Slot], min_numel: int) -> list[Unit]:
    """What has a level of its own, in order."""
    large = sum(slot.numel >= min_numel for slot in slots)
    found = [Unit(slot.name, slot.start, slot.numel, False) for slot in slots[:large]]
    if rest := slots[large:]:
        found.append(Unit(rest[0].name, rest[0].start, sum(slot.numel for slot in rest), True))
    return found


def levels_at(bits: float, of: list[Unit]) -> tuple[float, ...]:
    """Of units that have no levels of their own in a step at that level."""
    return tuple(max(bits, SMALL_BITS) if unit.small else bits for unit in of)


def runs(of: list[Unit], levels: tuple[float, ...], block_size: int) -> list[Run]:
    """The levels of a bucket's blocks. A block of several units has the highest of theirs."""
    blocks = torch.zeros(of[-1].blocks(block_size).stop, dtype=torch.float64, device="cpu")
    for unit, level in zip(of, levels, strict=True):
        blocks[unit.blocks(block_size)].clamp_(min=level)
    found, counts = blocks.unique_consecutive(return_counts=True)
    ends = counts.cumsum(0)
    rows = zip((ends - counts).tolist(), counts.tolist(), found.tolist(), strict=True)
    return [Run(first, count, check_level("bits", level)) for first, count, level in rows]
