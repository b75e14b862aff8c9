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

# What Horovod's allreduce takes on CPUs.
_HOROVOD_FLOATS = (torch.float16, torch.float32, torch.float64)


def wire_form(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as Horovod can reduce it: contiguous, and with bfloat16 as float32."""
    if gradient.is_floating_point() and gradient.dtype not in _HOROVOD_FLOATS:
        gradient = gradient.float()
    return gradient.contiguous()


def reduce_uncompressed(
    bucket: Bucket, gradients: list[torch.Tensor | None], factor: float, transport: Transport
) -> Collectives[int]:
    """Reduce a bucket's gradients where they are, each on its own.

    Args:
        bucket: what travels.
        gradients: by slot; None for one that is missing: zeros are sent, so that all ranks have the same slots.
        factor: multiplies the sum over ranks.
        transport: sends it.

    Returns:
        Bytes reduced.
    """
    nbytes, handles = 0, []
    for slot, gradient in zip(bucket.slots, gradients, strict=True):
        own = torch.zeros(slot.shape, dtype=torch.float32, device=bucket.device) if gradient is None else gradient
        wire = wire_form(own.clone())
        nbytes += wire.numel() * wire.element_size()
        handles.append(transport.sum(wire, f"{bucket.collective}.{slot.index}.uncompressed"))
    failure: Exception | None = None
    for gradient, handle in zip(gradients, handles, strict=True):
        try:
            total = yield handle
            if gradient is not None and failure is None:
                with torch.inference_mode(gradient.is_inference()), torch.no_grad():
                    gradient.copy_(total * factor)
        except Exception as error:  # noqa: BLE001  # the rest is in flight
            failure = failure or error
    if failure is not None:
        raise failure
    return nbytes
