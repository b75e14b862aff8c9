"""The residuals of a bucket: values that quantization has not delivered yet, and that error feedback adds later.

Each residual is delivered once, with a later gradient, unless it is dropped.
"""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.streams import streams_of
from hvd_dyncomp.kernels import RESIDUAL_DTYPE


class Residuals:
    """The residuals of one bucket on one rank.

    Args:
        own_range: the values that this rank quantizes first: those of its gradients, or of its host's sum.
        shard_range: the values whose sum over ranks it quantizes; empty if two ranks exchange all of `own_range`.
        device: of the gradients.
        enabled: whether there is error feedback.

    Attributes:
        own_range, shard_range, enabled: see above.
        own: (values of `own_range`,) bfloat16, left by the first quantization.
        shard: (values of `shard_range`,) bfloat16, left by the quantization of the sum over ranks.
        carries: whether any residual of any rank may be nonzero: the same on all ranks.
    """

    def __init__(self, own_range: slice, shard_range: slice, device: torch.device, *, enabled: bool) -> None:
        self.own_range, self.shard_range, self.enabled = own_range, shard_range, enabled
        own, shard = ((part.stop - part.start) * enabled for part in (own_range, shard_range))
        self.own = torch.zeros(own, dtype=RESIDUAL_DTYPE, device=device)
        self.shard = torch.zeros(shard, dtype=RESIDUAL_DTYPE, device=device)
        streams_of(device).keep(self.own, self.shard)
        self.carries = False

    def section(self, part: slice = slice(None)) -> torch.Tensor | None:
        """A part of `own`, for a kernel; None without error feedback."""
        return self.own[part] if self.enabled else None

    def of_shard(self) -> torch.Tensor | None:
        """`shard`, for a kernel; None without error feedback."""
        return self.shard if self.enabled else None

    def quantized(self) -> None:
        """Note that a kernel has written `own`."""
        self.carries = self.enabled

    def drop(self) -> None:
        """Set all residuals to zero."""
        self.own.zero_()
        self.shard.zero_()
        self.carries = False
