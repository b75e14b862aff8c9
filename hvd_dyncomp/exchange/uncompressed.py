"""A bucket's gradients as they are, without residuals: for steps before which no rank's backward has run.

`optimizer.synchronize()`, clipping, `optimizer.step()` (without `skip_synchronize`) reduces what has been reduced, and
what the user has made of it. Horovod does so, with a warning. Nothing of it is new: a residual that joined it would
undo the clipping.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.transport.base import Transport

# What Horovod's allreduce takes on CPUs.
_HOROVOD_FLOATS = (torch.float16, torch.float32, torch.float64)


def wire_form(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as Horovod can reduce it: contiguous, and not bfloat16, which travels as float32."""
    if gradient.is_floating_point() and gradient.dtype not in _HOROVOD_FLOATS:
        gradient = gradient.float()
    return gradient.contiguous()


class UncompressedExchange:
    """One bucket, one step.

    Args:
        bucket: what travels.
        gradients: by slot; None for one that has not come, and has no result.
        factor: what the sum over ranks is multiplied by.
        transport: who carries it.

    Attributes:
        nbytes: what is reduced, by parameter's name.
    """

    def __init__(
        self, bucket: Bucket, gradients: list[torch.Tensor | None], *, factor: float, transport: Transport
    ) -> None:
        self._bucket, self._gradients, self._factor, self._transport = bucket, gradients, factor, transport
        self._handles: list[Any] = []
        self.nbytes: dict[str, int] = {}

    def start(self) -> None:
        """Sends everything. All ranks have the same slots: those without a gradient send zeros."""
        for slot, gradient in zip(self._bucket.slots, self._gradients, strict=True):
            if gradient is None:
                gradient = torch.zeros(slot.shape, dtype=torch.float32, device=self._bucket.device)
            wire = wire_form(gradient.clone())
            self.nbytes[slot.name] = wire.numel() * wire.element_size()
            self._handles.append(self._transport.sum(wire, f"{self._bucket.collective}.{slot.index}.uncompressed"))

    def drained(self, *, wait: bool = False) -> bool:
        """Whether nothing is under way any more; for one that nobody wants delivered.

        Args:
            wait: block until that is so.
        """
        while self._handles and (wait or self._transport.poll(self._handles[-1])):
            self._transport.wait(self._handles.pop())
        return not self._handles

    def deliver(self) -> None:
        """Blocks until every gradient holds the reduced one."""
        for gradient, handle in zip(self._gradients, self._handles, strict=True):
            total = self._transport.wait(handle)
            if gradient is not None:
                with torch.inference_mode(gradient.is_inference()), torch.no_grad():
                    gradient.copy_(total * self._factor)
