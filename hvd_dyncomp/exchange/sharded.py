"""The exchange in two halves: scatter, reduce, gather (docs/math.md, equations 1 to 5).

1. Every rank quantizes gradient + residual, cuts the blocks into one shard per rank and sends each shard to its owner
   (an alltoall of bytes).
2. The owner decodes the versions of its shard, sums them, adds the shard's residual and quantizes the sum.
3. An allgather of bytes returns it to everyone. All ranks decode the same bytes, and so hold the same bits.

Whatever the number of workers N, a value costs a worker 2(N-1)/N * bits on the wire, and is quantized twice.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.base import Exchange, Ready
from hvd_dyncomp.exchange.codec import Phase, count_nonfinite, header_tensor, split_messages


class ShardedExchange(Exchange):
    """See the module."""

    _scatter: Any = None
    _gather: Any = None

    def forward(self) -> None:
        super().forward()
        if self._gather is None and self._error is None:
            self._reduce()

    def _encode(self) -> tuple[torch.Tensor, list[int]]:
        bucket = self._bucket
        messages, payloads, lengths = self._message(Phase.SCATTER, bucket.shards)
        noise = self._noise(Phase.SCATTER)
        for payload, block, count in zip(payloads, bucket.bounds, bucket.shards, strict=False):
            first = block * bucket.block_size
            residual = bucket.residuals and bucket.residuals.own[first : first + count * bucket.block_size]
            shard_noise = noise and noise._replace(first=first)
            kernels.encode_into(payload, self._values, residual, first=first, noise=shard_noise, **self._format)
        return messages, lengths

    def _send(self, messages: torch.Tensor, lengths: list[int]) -> None:
        self.sent_bytes += messages.numel() - lengths[self._bucket.rank]
        self._scatter = self._transport.alltoall(messages, lengths, self._name(Phase.SCATTER))

    def _move(self, ready: Ready) -> None:
        if self._gather is None and ready(self._scatter):
            self._reduce()
        if not self._delivered and self._gather is not None and self._error is None and ready(self._gather):
            self._decode()

    def _reduce(self) -> None:
        """From all versions of this rank's shard to the message with their sum.

        The others wait for it: if there can be none, they are told, and the error is kept for `deliver`.
        """
        received = self._transport.wait(self._scatter)
        try:
            message = self._reduced(received)
        except Exception as error:  # noqa: BLE001
            self._error = error
            message = header_tensor(self._header(Phase.ABORT, 0), self._bucket.device)
        self.sent_bytes += message.numel() * (self._bucket.world_size - 1)
        self._gather = self._transport.allgather(message, self._name(Phase.GATHER))

    def _reduced(self, received: torch.Tensor) -> torch.Tensor:
        bucket = self._bucket
        own = bucket.shards[bucket.rank]
        expected = [self._header(Phase.SCATTER, own)] * bucket.world_size
        versions = split_messages(received, expected, bucket.block_size, self._where)
        message, [payload], _ = self._message(Phase.GATHER, [own])
        noise = self._noise(Phase.GATHER)
        kernels.reduce_into(
            payload,
            versions,
            bucket.residuals and bucket.residuals.shard,
            real=max(0, bucket.values - bucket.own_range.start),
            noise=noise and noise._replace(first=bucket.own_range.start),
            **self._format,
        )
        return message

    def _decode(self) -> None:
        bucket = self._bucket
        expected = [self._header(Phase.GATHER, count) for count in bucket.shards]
        shards = split_messages(self._transport.wait(self._gather), expected, bucket.block_size, self._where)
        for shard, block in zip(shards, bucket.bounds, strict=False):
            first = block * bucket.block_size
            kernels.decode_into(self._values, [shard], first=first, factor=self._factor, **self._format)
            self.nonfinite_blocks += count_nonfinite([shard], self._bits, bucket.block_size)
        self._write_back()
