"""The places of parameters' values in buckets, and the levels of their blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from hvd_dyncomp.exchange.coding import SMALL_BITS
from hvd_dyncomp.exchange.settings import Skip


@dataclass(frozen=True)
class Slot:
    """A parameter's place: number `index` in bucket `bucket`, with its values from `start` to `start + numel`.

    Attributes:
        small: whether it has fewer than `min_numel` values, and so at least `SMALL_BITS`.
        counted_as: its name in `diagnostics.relative_errors`; small parameters have that of the bucket's first small
            one.
        order: its dimensions, from the one that changes slowest from value to value to the fastest.
    """

    name: str
    shape: tuple[int, ...]
    bucket: int
    index: int
    start: int
    numel: int
    small: bool
    counted_as: str
    order: tuple[int, ...]

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.numel)

    def logical(self, values: torch.Tensor) -> torch.Tensor:
        """The bucket's values of this parameter, as a view of its shape."""
        return logical(values[self.range], self.shape, self.order)

    def flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of its shape, as (numel,) values in the bucket's order."""
        return tensor.permute(self.order).reshape(-1)


def logical(values: torch.Tensor, shape: Sequence[int], order: Sequence[int]) -> torch.Tensor:
    """(numel,) values of a parameter, as a view of its shape; `order` as in `Slot`."""
    return values.view([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(order))])


def marks_of(count: int, unused: Collection[Slot]) -> torch.Tensor:
    """The marks in the headers of a bucket of `count` slots: a bit for each slot, from the lowest up; 0 if unused.

    Returns:
        uint8, a multiple of 4 bytes, so that the payload behind a header is aligned.
    """
    marks = (1 << count) - 1
    for slot in unused:
        marks &= ~(1 << slot.index)
    return torch.frombuffer(bytearray(marks.to_bytes(4 * -(-count // 32), "little")), dtype=torch.uint8)


def is_marked(marks: torch.Tensor, slot: Slot) -> bool:
    """Whether the slot's bit is 1, in marks on the host."""
    return bool(int(marks[slot.index // 8]) >> slot.index % 8 & 1)


def divided(
    parameters: list[tuple[str, torch.Tensor]],
    min_numel: int,
    bucket_bytes: int,
    skip: Skip | None,
    as_in_memory: bool = False,
    parts: Mapping[str, str] | None = None,
) -> list[tuple[torch.device, list[Slot]]]:
    """The places of all parameters, by bucket, and each bucket's device; arguments as in `buckets.make_buckets`."""
    groups: list[tuple[torch.device, list[tuple[str, torch.Tensor]]]] = []
    nbytes, part = 0, None
    for name, parameter in reversed(parameters):
        if not parameter.numel() or not parameter.is_floating_point() or (skip is not None and skip(name, parameter)):
            continue
        nbytes += 4 * parameter.numel()
        before, part = part, parts[name] if parts else None
        if not groups or groups[-1][0] != parameter.device or part != before or nbytes > bucket_bytes:
            groups.append((parameter.device, []))
            nbytes = 4 * parameter.numel()
        groups[-1][1].append((name, parameter))
    return [
        (device, _slots(members, number, min_numel, as_in_memory)) for number, (device, members) in enumerate(groups)
    ]


def _slots(members: list[tuple[str, torch.Tensor]], bucket: int, min_numel: int, as_in_memory: bool) -> list[Slot]:
    """Consecutive places, small parameters last."""
    slots: list[Slot] = []
    start, first_small = 0, ""
    for name, parameter in sorted(members, key=lambda member: member[1].numel() < min_numel):
        numel = parameter.numel()
        small = numel < min_numel
        if small:
            first_small = first_small or name
        where = bucket, len(slots), start, numel
        order = _order(parameter) if as_in_memory else tuple(range(parameter.dim()))
        slots.append(Slot(name, tuple(parameter.shape), *where, small, first_small if small else name, order))
        start += numel
    return slots


def _order(parameter: torch.Tensor) -> tuple[int, ...]:
    """`Slot.order` of a gradient that lies in memory as its parameter does; logical if that one's memory has gaps."""
    logical = tuple(range(parameter.dim()))
    stored = tuple(sorted(logical, key=parameter.stride, reverse=True))
    # A dimension of one value has any stride: so the first question.
    return stored if not parameter.is_contiguous() and parameter.permute(stored).is_contiguous() else logical


def tail(slots: list[Slot], bits: float, block_size: int) -> int:
    """The first of a bucket's blocks that have `SMALL_BITS` in a step at this level; all after it have them, too.

    They are those with values of small tensors; a block of large and small ones has the higher level.

    Returns:
        The number of all blocks if there is no such block.
    """
    if bits < SMALL_BITS and slots[-1].small:  # small ones are last
        return next(slot.start // block_size for slot in slots if slot.small)
    return -(-(slots[-1].start + slots[-1].numel) // block_size)
