"""The places of parameters' values in buckets.

Kernels leave a block of zeros and its residual alone. So that a parameter that no rank uses keeps its residual, a large
tensor begins a block, and shares none. The block before it is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from hvd_dyncomp.exchange.coding import Run
from hvd_dyncomp.exchange.settings import Skip

# Tensors of fewer values, or of less than two blocks, share blocks: padding would be a large part of them.
_LEAST_ALONE = 1024


@dataclass(frozen=True)
class Slot:
    """A parameter's place: number `index` in bucket `bucket`, with its values from `start` to `start + numel`.

    Attributes:
        small: whether it has fewer than `min_numel` values, and so at least `SMALL_BITS`.
        order: its dimensions, from the one that changes slowest from value to value to the fastest.
    """

    name: str
    shape: tuple[int, ...]
    bucket: int
    index: int
    start: int
    numel: int
    small: bool
    order: tuple[int, ...]

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.numel)

    def logical(self, values: torch.Tensor) -> torch.Tensor:
        """The bucket's values of this parameter, as a view of its shape."""
        stored = values[self.range].view([self.shape[dim] for dim in self.order])
        return stored.permute([self.order.index(dim) for dim in range(len(self.order))])


def divided(
    parameters: list[tuple[str, torch.Tensor]],
    min_numel: int,
    bucket_bytes: int,
    block_size: int,
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
        (device, _slots(members, number, min_numel, block_size, as_in_memory))
        for number, (device, members) in enumerate(groups)
    ]


def _slots(
    members: list[tuple[str, torch.Tensor]], bucket: int, min_numel: int, block_size: int, as_in_memory: bool
) -> list[Slot]:
    """Places in ascending order: small parameters last, and those that share blocks together."""

    def kind(parameter: torch.Tensor) -> tuple[bool, bool]:
        return parameter.numel() < min_numel, parameter.numel() < max(_LEAST_ALONE, 2 * block_size)

    slots: list[Slot] = []
    start, before = 0, None
    for name, parameter in sorted(members, key=lambda member: kind(member[1])):
        numel = parameter.numel()
        small, shares = kind(parameter)
        if not (shares and before == (small, shares)):
            start = -(-start // block_size) * block_size
        before = small, shares
        where = bucket, len(slots), start, numel
        order = _order(parameter) if as_in_memory else tuple(range(parameter.dim()))
        slots.append(Slot(name, tuple(parameter.shape), *where, small, order))
        start += numel
    return slots


def _order(parameter: torch.Tensor) -> tuple[int, ...]:
    """`Slot.order` of a gradient that lies in memory as its parameter does; logical if that one's memory has gaps."""
    logical = tuple(range(parameter.dim()))
    stored = tuple(sorted(logical, key=parameter.stride, reverse=True))
    # A dimension of one value has any stride: so the first question.
    return stored if not parameter.is_contiguous() and parameter.permute(stored).is_contiguous() else logical


def runs_of(slots: Sequence[Slot], block_size: int) -> list[Run]:
    """The runs of a bucket: they end where there is padding, and before the first small parameter."""
    runs: list[Run] = []
    for slot in slots:
        if runs and slot.start == runs[-1].end and slot.small == runs[-1].small:
            runs[-1] = runs[-1]._replace(end=slot.start + slot.numel)
        else:
            runs.append(Run(slot.start // block_size, slot.start + slot.numel, slot.small))
    return runs
