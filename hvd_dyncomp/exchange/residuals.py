"""The residuals of a bucket: values that quantization has not delivered yet, and that error feedback adds later.

Each residual is delivered once, with a later gradient, unless it is dropped.
"""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.streams import streams_of
from hvd_dyncomp.kernels import RESIDUAL_DTYPE, bounded, rounded


class Residuals:
    """The residuals of one bucket on one rank.

    Args:
        values: number of the bucket's values, padding included.
        own_range: the values that this rank quantizes first: those of its gradients, or of its host's sum.
        shard_range: the values whose sum over ranks it quantizes; empty if two ranks exchange all of `own_range`.
        device: of the gradients.
        enabled: whether there is error feedback.

    Attributes:
        own_range, shard_range, enabled: see above.
        own: (values of `own_range`,) bfloat16, left by the first quantization.
        shard: (values of `shard_range`,) bfloat16, left by the quantization of the sum over ranks.
        carries: whether any residual may be nonzero.
    """

    def __init__(
        self,
        values: int,
        own_range: slice,
        shard_range: slice,
        device: torch.device,
        *,
        enabled: bool,
    ) -> None:
        self.own_range, self.shard_range, self.enabled = own_range, shard_range, enabled
        self._values, self._device = values, device
        own, shard = ((part.stop - part.start) * enabled for part in (own_range, shard_range))
        self.own = torch.zeros(own, dtype=RESIDUAL_DTYPE, device=device)
        self.shard = torch.zeros(shard, dtype=RESIDUAL_DTYPE, device=device)
        streams_of(device).keep(self.own, self.shard)
        # (values of the bucket,) bfloat16: residuals that are added to gradients before any rank quantizes these.
        # Nonzero for values that another rank quantizes since the bucket was rearranged.
        self._pending: torch.Tensor | None = None
        self.carries = False

    @property
    def _whole(self) -> bool:
        """Whether this rank quantizes every value of the bucket first."""
        return self.own.numel() == self._values

    def section(self, part: slice = slice(None)) -> torch.Tensor | None:
        """A part of `own`, for a kernel; None without error feedback."""
        return self.own[part] if self.enabled else None

    def of_shard(self) -> torch.Tensor | None:
        """`shard`, for a kernel; None without error feedback."""
        return self.shard if self.enabled else None

    def quantized(self) -> None:
        """Note that a kernel has written `own`."""
        self.carries = self.enabled

    def undelivered(self) -> torch.Tensor:
        """(values,) bfloat16: all residuals but the shard's. May be `own` itself. Only with error feedback."""
        if self._whole:
            return self.own
        if self._pending is None:
            total = torch.zeros(self._values, dtype=RESIDUAL_DTYPE, device=self._device)
        else:
            total = self._pending.clone()
        total[self.own_range] += self.own  # exact: nothing is pending of what is in `own`
        return total

    def _collected(self) -> torch.Tensor:
        """`undelivered` plus the shard's residual, which becomes zero.

        The shard's residual belongs to the sum over ranks. Only its owner delivers it, and so it arrives once.
        """
        total = self.undelivered()
        if self.shard.numel():
            both = total[self.shard_range].to(torch.float32) + self.shard.to(torch.float32)
            total[self.shard_range] = rounded(both)
            self.shard.zero_()
        return total

    def put(self, undelivered: torch.Tensor) -> None:
        """Replace all residuals but the shard's by a result of `undelivered`, of this or another object.

        Args:
            undelivered: (values,), bfloat16 or float32.
        """
        undelivered = rounded(undelivered)
        self.own.copy_(undelivered[self.own_range])
        self._pending = None
        if not self._whole:
            rest = undelivered.clone()
            rest[self.own_range] = 0
            self._pending = rest if rest.any() else None

    def drop(self) -> None:
        """Set all residuals to zero."""
        self.own.zero_()
        self.shard.zero_()
        self._pending, self.carries = None, False

    def add_all_pending(self, slots: list[Slot], values: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return float32 gradients plus their pending residuals, which become zero.

        As in quantization, nothing is added to a gradient that is zero or not finite: the residual stays pending.
        """
        if self._pending is None:
            return values
        total, waits = [], False
        for slot, gradient in zip(slots, values, strict=True):
            pending = self._pending[slot.range].view(slot.shape)
            adds = 0 < float(gradient.abs().max()) < float("inf")
            total.append(gradient + bounded(pending.to(torch.float32), gradient) if adds else gradient)
            if adds:
                pending.zero_()
            waits = waits or bool(pending.any())
        if not waits:
            self._pending = None
        return total
