"""The exchange of two workers: each sends the other its whole bucket, and both sum.

With two workers this costs the bytes of scatter, reduce, gather, 2(N-1)/N * bits = bits a value, and needs one
quantization and one collective less. With more it would cost (N-1) * bits.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.base import Exchange, Ready
from hvd_dyncomp.exchange.codec import Phase, count_nonfinite, split_messages


class PairExchange(Exchange):
    """See the module."""

    _handle: Any = None

    def _encode(self) -> tuple[torch.Tensor, list[int]]:
        bucket = self._bucket
        message, [payload], lengths = self._message(Phase.PAIR, [bucket.blocks])
        residual = bucket.residuals and bucket.residuals.own
        kernels.encode_into(payload, self._values, residual, noise=self._noise(Phase.PAIR), **self._format)
        return message, lengths

    def _send(self, message: torch.Tensor, lengths: list[int]) -> None:
        self.sent_bytes += message.numel() * (self._bucket.world_size - 1)
        self._handle = self._transport.allgather(message, self._name(Phase.PAIR))

    def _move(self, ready: Ready) -> None:
        if self._delivered or not ready(self._handle):
            return
        bucket = self._bucket
        expected = [self._header(Phase.PAIR, bucket.blocks)] * bucket.world_size
        received = self._transport.wait(self._handle)
        versions = split_messages(received, expected, bucket.block_size, self._where)
        # In the order of the ranks, so that all replicas hold the same bits.
        kernels.decode_into(self._values, versions, factor=self._factor, **self._format)
        # Now that decoding has brought them into the caches.
        self.nonfinite_blocks = count_nonfinite(versions, self._bits, bucket.block_size)
        self._write_back()
