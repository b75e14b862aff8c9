"""Parameters without a gradient on any rank: their means are thrown away, so what their residuals hold stays there.

A kernel leaves a block of zeros alone. But in a block that a parameter shares with others it sends residuals of all
of them. So these are copied first, and written back when it is known that no rank has used the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.transport.base import Transport


def in_shared_blocks(slot: Slot, values: int, block_size: int) -> list[slice]:
    """Those of a parameter's values in blocks that hold other parameters' values, too.

    Args:
        values: of the bucket, without padding.
    """
    end = slot.start + slot.numel
    head = slot.start if slot.start % block_size == 0 else min(end, -(-slot.start // block_size) * block_size)
    tail = end if end % block_size == 0 or end == values else max(slot.start, end // block_size * block_size)
    if head >= tail:
        return [slot.range]
    return [part for part in (slice(slot.start, head), slice(tail, end)) if part.start < part.stop]


class Kept:
    """Copies of a bucket's residuals in shared blocks.

    Args:
        bucket: nothing of it has been quantized in this step.
        slots: the parameters.
    """

    def __init__(self, bucket: Bucket, slots: Sequence[Slot]) -> None:
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        extent = bucket.residuals.extent
        for slot in slots if bucket.residuals.enabled else ():
            copies = self._copies.setdefault(slot.index, [])
            for part in in_shared_blocks(slot, bucket.values, bucket.block_size):
                for residual, where in ((bucket.residuals.own, extent.section), (bucket.residuals.shard, extent.shard)):
                    first, last = max(part.start, where.start), min(part.stop, where.stop)
                    if first < last:
                        place = residual[first - where.start : last - where.start]
                        copies.append((place, place.clone()))
                        bucket.streams.keep(copies[-1][1])

    def put_back(self, slot: Slot) -> None:
        """Restore a parameter's residual to what it was."""
        for place, copy in self._copies.pop(slot.index, ()):
            place.copy_(copy)


class Usage:
    """Which parameters any rank uses in a step: one sum over ranks, where the source of gradients makes none.

    Args:
        transport: sends it.
        name: of the collective.
        slots: the parameters, by name.
    """

    def __init__(self, transport: Transport, name: str, slots: Mapping[str, Slot]) -> None:
        self._transport, self._name, self._slots = transport, name, slots
        self._handle: Any = None

    def start(self, used: Mapping[str, bool | torch.Tensor]) -> None:
        """Send which ones this rank uses; one that is missing counts as used. No effect when it has been called."""
        if self._handle is None:
            own = [float(used.get(name, True)) for name in self._slots]
            self._handle = self._transport.sum(torch.tensor(own, dtype=torch.float32, device="cpu"), self._name)

    def drained(self, *, wait: bool) -> bool:
        """Whether nothing is in flight, when nobody wants the result. `wait`: block until then."""
        if wait:
            self._transport.wait(self._handle)
        return wait or self._transport.poll(self._handle)

    def unused(self) -> list[Slot]:
        """Block; return the parameters that no rank uses, the same on all ranks."""
        total = self._transport.wait(self._handle).tolist()
        return [slot for slot, users in zip(self._slots.values(), total, strict=True) if not users]
