"""A bucket's gradients unchanged and without residuals: for steps before which no rank has run backward.

`optimizer.synchronize()`, clipping, `optimizer.step()` (without `skip_synchronize`) reduces the reduced gradients
again, with the user's changes. Horovod does so with a warning. The gradients are not new: a residual that joined them
would undo the clipping.
"""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.task import Collectives
from hvd_dyncomp.transport.base import Transport


def wire_form(gradient: torch.Tensor, transport: Transport) -> torch.Tensor:
    """A gradient as the transport can sum it: contiguous, and as float32 if it takes no such dtype."""
    if gradient.is_floating_point() and not transport.takes(gradient.dtype):
        gradient = gradient.float()
    return gradient.contiguous()


def sums(bucket: Bucket, gradients: list[torch.Tensor | None], transport: Transport) -> Collectives[list[torch.Tensor]]:
    """Sum a bucket's gradients over ranks, each on its own.

    Args:
        bucket: what travels.
        gradients: by slot; None for one that is missing: zeros are sent, so that all ranks have the same slots.
        transport: sends them.

    Returns:
        The sums, by slot.
    """
    handles = []
    for slot, gradient in zip(bucket.slots, gradients, strict=True):
        own = torch.zeros(slot.shape, dtype=torch.float32, device=bucket.device) if gradient is None else gradient
        wire = wire_form(own.clone(), transport)
        handles.append(transport.sum(wire, f"{bucket.collective}.{slot.index}.uncompressed"))
    totals: list[torch.Tensor] = []
    for handle in handles:
        totals.append((yield handle))
    return totals
