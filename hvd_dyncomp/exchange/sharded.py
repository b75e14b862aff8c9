"""The reduction in two halves: scatter, reduce, gather (docs/math.md, equations 1 to 5).

1. Every rank quantizes gradient + residual, cuts the blocks into one shard per rank and sends each shard to its owner
   (an alltoall of bytes).
2. The owner decodes the versions of its shard, sums them, adds the shard's residual and quantizes the sum.
3. An allgather of bytes returns it to everyone. All ranks decode the same bytes, and so hold the same bits.

Whatever the number of workers N, a value costs a worker 2(N-1)/N * bits on the wire, and is quantized twice.
"""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.ranges import marked
from hvd_dyncomp.exchange.reduction import Collectives, Outgoing, Reduction
from hvd_dyncomp.exchange.wire import Phase


class ShardedReduction(Reduction):
    """See the module."""

    @property
    def _in_one(self) -> bool:
        # On a GPU a call is a launch: one for each rank would keep the program busy. So codes are copied.
        return self._bucket.streams.late

    @marked("encode")
    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        bucket, section = self._bucket, self.section
        coding, begin = self._messages.coding, section.first * bucket.block_size
        noise = self._messages.noise(Phase.SCATTER)
        if self._in_one:
            codes = torch.empty(coding.nbytes(section.span), dtype=torch.uint8, device=bucket.device)
            parts = [(section.span, codes)]
        else:
            messages, payloads, lengths = self._messages.codes(Phase.SCATTER, section.shards)
            parts = list(zip(section.shards, payloads, strict=True))
        for shard, payload in parts:
            first, size = shard.first * bucket.block_size - begin, shard.blocks * bucket.block_size
            residual = bucket.residuals.section(slice(first, first + size))
            coding.encode(payload, shard, values, residual, origin=origin, noise=noise)
        if self._in_one:
            messages, lengths = self._messages.around(Phase.SCATTER, section.shards, codes)
        bucket.residuals.quantized()
        return messages, lengths

    def collectives(
        self, values: list[torch.Tensor], failure: Exception | None, origin: int = 0
    ) -> Collectives[torch.Tensor]:
        outgoing, failure = self._first_messages(values, failure, origin, len(self.section.ranks))
        del values
        yield None
        handle = self._group.alltoall(*outgoing, self._messages.name(Phase.SCATTER))
        del outgoing  # the transport has it
        if failure is None:
            try:
                message = self._reduced((yield handle))
            except Exception as error:  # noqa: BLE001  # the others wait: they are told, and then it is raised
                failure = error
        if failure is not None:
            message, _ = self._messages.aborts(1)
        handle = self._group.allgather(message, self._messages.name(Phase.GATHER))
        del message
        if failure is not None:
            raise failure
        return (yield handle)

    @marked("reduce")
    def _reduced(self, received: torch.Tensor) -> torch.Tensor:
        """From all versions of this rank's shard to the message with their sum."""
        bucket, section = self._bucket, self.section
        own = section.shards[section.ranks.index(bucket.rank)]
        versions = self._messages.split(received, Phase.SCATTER, [own] * len(section.ranks), section.ranks)
        message, [payload], _ = self._messages.codes(Phase.GATHER, [own])
        self._messages.coding.reduce(
            payload,
            own,
            versions,
            bucket.residuals.of_shard(),
            values=bucket.values,
            noise=self._messages.noise(Phase.GATHER),
        )
        return message

    @property
    def _result(self) -> tuple[Phase, list[Span]]:
        return Phase.GATHER, self.section.shards

    @marked("decode")
    def decode(
        self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]
    ) -> torch.Tensor:
        payloads, coding = self.messages_in(result, senders), self._messages.coding
        shards = self.section.shards
        if self._in_one:
            payloads, shards = [torch.cat(payloads)], [self.section.span]
        pairs = zip(shards, payloads, strict=True)
        return torch.stack([coding.decode(values, shard, [payload], factor) for shard, payload in pairs]).sum()
