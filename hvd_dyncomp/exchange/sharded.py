"""The reduction in two halves: scatter, reduce, gather (docs/math.md, equations 1 to 5).

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
from hvd_dyncomp.exchange.codec import Header, Phase, count_nonfinite, split_messages
from hvd_dyncomp.exchange.reduction import Course, Outgoing, Reduction


class ShardedReduction(Reduction):
    """See the module."""

    @property
    def _first_messages(self) -> int:
        return len(self.section.ranks)

    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        bucket, section = self._bucket, self.section
        messages, payloads, lengths = self._messages.codes(Phase.SCATTER, section.shards)
        begin = section.first * bucket.block_size
        for payload, block, count in zip(payloads, section.bounds, section.shards, strict=False):
            first = block * bucket.block_size
            owed = bucket.residuals and bucket.residuals.own[first - begin :][: count * bucket.block_size]
            noise = self._messages.noise(Phase.SCATTER, first)
            kernels.encode_into(payload, values, owed, first=first - origin, noise=noise, **self._messages.format)
        bucket.keep_residuals()
        return messages, lengths

    def _start(self, messages: torch.Tensor, lengths: list[int]) -> Any:
        return self._group.alltoall(messages, lengths, self._messages.name(Phase.SCATTER))

    def _rest(self, handle: Any, failure: Exception | None) -> Course[torch.Tensor]:
        if failure is None:
            received = yield handle
            try:
                message = self._reduced(received)
                del received
            except Exception as error:  # noqa: BLE001  # the others wait: they are told, and then it is raised
                failure = error
        handle = self._group.allgather(self._abort() if failure else message, self._messages.name(Phase.GATHER))
        if failure is not None:
            raise failure
        return (yield handle)

    def _reduced(self, received: torch.Tensor) -> torch.Tensor:
        """From all versions of this rank's shard to the message with their sum."""
        bucket, section = self._bucket, self.section
        place = section.ranks.index(bucket.rank)
        own, first = section.shards[place], section.bounds[place] * bucket.block_size
        expected = [self._header(Phase.SCATTER, own)] * len(section.ranks)
        versions = split_messages(received, expected, bucket.block_size, self._messages.where, section.ranks)
        message, [payload], _ = self._messages.codes(Phase.GATHER, [own])
        kernels.reduce_into(
            payload,
            versions,
            bucket.residuals and bucket.residuals.shard,
            real=max(0, bucket.values - first),
            noise=self._messages.noise(Phase.GATHER, first),
            **self._messages.format,
        )
        return message

    def _expected(self) -> list[Header]:
        return [self._header(Phase.GATHER, count) for count in self.section.shards]

    def decode(self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]) -> int:
        size, form = self._bucket.block_size, self._messages.format
        shards = self.messages_in(result, senders)
        for shard, block in zip(shards, self.section.bounds, strict=False):
            kernels.decode_into(values, [shard], first=block * size, factor=factor, **form)
        return sum(count_nonfinite([shard], self._messages.bits, size) for shard in shards)
