"""A bucket's gradients unchanged and without residuals: for steps before which no rank has run backward.

`optimizer.synchronize()`, clipping, `optimizer.step()` (without `skip_synchronize`) reduces the reduced gradients
again, with the user's changes. Horovod does so with a warning. The gradients are not new: a residual that joined them
would undo the clipping.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.transport.base import Transport

# What Horovod's allreduce takes on CPUs.
_HOROVOD_FLOATS = (torch.float16, torch.float32, torch.float64)


def wire_form(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient as Horovod can reduce it: contiguous, and with bfloat16 as float32."""
    if gradient.is_floating_point() and gradient.dtype not in _HOROVOD_FLOATS:
        gradient = gradient.float()
    return gradient.contiguous()


class UncompressedExchange:
    """The uncompressed exchange of one bucket in one step.

    Args:
        bucket: what travels.
        gradients: by slot; None for one that is missing and gets no result.
        factor: multiplies the sum over ranks.
        transport: sends it.

    Attributes:
        nbytes: bytes reduced, by parameter's name.
    """

    def __init__(
        self, bucket: Bucket, gradients: list[torch.Tensor | None], *, factor: float, transport: Transport
    ) -> None:
        self._bucket, self._gradients, self._factor, self._transport = bucket, gradients, factor, transport
        self._handles: list[Any] = []
        self.nbytes: dict[str, int] = {}

    def start(self) -> None:
        """Send everything. All ranks have the same slots: a rank without a gradient sends zeros."""
        for slot, gradient in zip(self._bucket.slots, self._gradients, strict=True):
            if gradient is None:
                gradient = torch.zeros(slot.shape, dtype=torch.float32, device=self._bucket.device)
            wire = wire_form(gradient.clone())
            self.nbytes[slot.name] = wire.numel() * wire.element_size()
            self._handles.append(self._transport.sum(wire, f"{self._bucket.collective}.{slot.index}.uncompressed"))

    def drained(self, *, wait: bool = False) -> bool:
        """Whether nothing is in flight; for an exchange whose result nobody wants.

        Args:
            wait: block until that is so.
        """
        while self._handles and (wait or self._transport.poll(self._handles[-1])):
            self._transport.wait(self._handles.pop())
        return not self._handles

    def deliver(self) -> None:
        """Block until every gradient holds the reduced one."""
        for gradient, handle in zip(self._gradients, self._handles, strict=True):
            total = self._transport.wait(handle)
            if gradient is not None:
                with torch.inference_mode(gradient.is_inference()), torch.no_grad():
                    gradient.copy_(total * self._factor)
