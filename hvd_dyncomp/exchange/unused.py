"""Keeps residuals of parameters that no rank uses in a step: their means are discarded, so nothing may be delivered.

Kernels skip a block of zeros with its residual. They do send residuals in a block that the parameter shares with
others, and where its gradient still holds values of an earlier step. These residuals are copied before the exchange,
and restored when all ranks are known not to use the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.slots import Slot


def in_shared_blocks(slot: Slot, values: int, block_size: int) -> list[slice]:
    """The parameter's values in blocks that also hold other parameters' values.

    Args:
        values: of the bucket, without padding.
    """
    end = slot.start + slot.numel
    head = slot.start if slot.start % block_size == 0 else min(end, -(-slot.start // block_size) * block_size)
    tail = end if end % block_size == 0 or end == values else max(slot.start, end // block_size * block_size)
    if head >= tail:
        return [slot.range]
    return [part for part in (slice(slot.start, head), slice(tail, end)) if part.start < part.stop]


def has_values(gradient: torch.Tensor) -> bool:
    """Whether any value of a gradient is not zero. Waits for its device."""
    few = gradient.view(-1)[:64] if gradient.is_contiguous() else gradient  # nearly always these decide
    return bool(few.any()) or bool(gradient.any())


class SavedResiduals:
    """Copies of residuals of one bucket that this step may send although no rank uses the parameter.

    Args:
        bucket: nothing of it has been quantized in this step.
        slots: parameters that this rank does not use; True if the gradient may hold values of earlier steps.
    """

    def __init__(self, bucket: Bucket, slots: Mapping[Slot, bool]) -> None:
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._pending: dict[int, torch.Tensor] = {}
        self._residuals = residuals = bucket.residuals
        for slot, has_stale_grad in slots.items() if residuals.enabled else ():
            copies = self._copies.setdefault(slot.index, [])
            if (pending := residuals.pending_of(slot.range)) is not None:
                self._pending[slot.index] = pending
                bucket.streams.keep(pending)
            for part in [slot.range] if has_stale_grad else in_shared_blocks(slot, bucket.values, bucket.block_size):
                for residual, where in ((residuals.own, residuals.own_range), (residuals.shard, residuals.shard_range)):
                    first, last = max(part.start, where.start), min(part.stop, where.stop)
                    if first < last:
                        place = residual[first - where.start : last - where.start]
                        copies.append((place, place.clone()))
                        bucket.streams.keep(copies[-1][1])

    def restore(self, slot: Slot) -> None:
        """Restore a parameter's residual to what it was."""
        for place, copy in self._copies.pop(slot.index, ()):
            place.copy_(copy)
        if (pending := self._pending.pop(slot.index, None)) is not None:
            self._residuals.set_pending(slot.range, pending)
