"""The reduction of two workers: each sends the other its whole section, and both sum.

With two workers this costs the bytes of scatter, reduce, gather, 2(N-1)/N * bits = bits a value, and needs one
quantization and one collective less. With more it would cost (N-1) * bits.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.codec import Header, Phase, count_nonfinite
from hvd_dyncomp.exchange.reduction import Course, Outgoing, Reduction


class PairReduction(Reduction):
    """See the module."""

    _first_messages = 1

    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        bucket, section = self._bucket, self.section
        first = section.first * bucket.block_size
        message, [payload], lengths = self._messages.codes(Phase.PAIR, [section.blocks])
        residual = bucket.residuals and bucket.residuals.own
        noise = self._messages.noise(Phase.PAIR, first)
        kernels.encode_into(payload, values, residual, first=first - origin, noise=noise, **self._messages.format)
        bucket.keep_residuals()
        return message, lengths

    def _start(self, messages: torch.Tensor, lengths: list[int]) -> Any:
        return self._group.allgather(messages, self._messages.name(Phase.PAIR))

    def _rest(self, handle: Any, failure: Exception | None) -> Course[torch.Tensor]:
        if failure is not None:
            raise failure
        return (yield handle)

    def _expected(self) -> list[Header]:
        return [self._header(Phase.PAIR, self.section.blocks)] * len(self.section.ranks)

    def decode(self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]) -> int:
        bucket, form = self._bucket, self._messages.format
        versions = self.messages_in(result, senders)
        first = self.section.first * bucket.block_size
        # In the order of the ranks, so that all replicas hold the same bits.
        kernels.decode_into(values, versions, first=first, factor=factor, **form)
        # Now that decoding has brought them into the caches.
        return count_nonfinite(versions, self._messages.bits, bucket.block_size)
