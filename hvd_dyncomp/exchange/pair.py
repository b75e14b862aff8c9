"""The reduction of two workers: each sends the other its whole section, and both sum.

With two workers this costs the bytes of scatter, reduce, gather, 2(N-1)/N * bits = bits a value, and needs one
quantization and one collective less. With more it would cost (N-1) * bits.

By an alltoall: Horovod fuses allgathers that it finds together, and nothing could be decoded before all has come.
"""

from __future__ import annotations

import torch

from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.ranges import marked
from hvd_dyncomp.exchange.reduction import Collectives, Outgoing, Reduction
from hvd_dyncomp.exchange.wire import Phase


class PairReduction(Reduction):
    """See the module."""

    @marked("encode")
    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        bucket, span = self._bucket, self.section.span
        message, [payload], lengths = self._messages.codes(Phase.PAIR, [span])
        noise = self._messages.noise(Phase.PAIR)
        self._messages.coding.encode(payload, span, values, bucket.residuals.section(), origin=origin, noise=noise)
        bucket.residuals.quantized()
        bucket.streams.keep(message)
        return message, lengths

    def collectives(
        self, values: list[torch.Tensor], failure: Exception | None, origin: int = 0
    ) -> Collectives[torch.Tensor]:
        (own, [length]), failure = self._first_messages(values, failure, origin, 1)
        del values
        yield None
        to_the_other = [0 if rank == self._bucket.rank else length for rank in self.section.ranks]
        handle = self._group.alltoall(own, to_the_other, self._messages.name(Phase.PAIR))
        if failure is not None:
            raise failure
        received = yield handle
        return torch.cat([own if rank == self._bucket.rank else received for rank in self.section.ranks])

    @property
    def _result(self) -> tuple[Phase, list[Span]]:
        return Phase.PAIR, [self.section.span] * len(self.section.ranks)

    @marked("decode")
    def decode(
        self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]
    ) -> torch.Tensor:
        # In the order of the ranks, so that all replicas hold the same bits.
        return self._messages.coding.decode(values, self.section.span, self.messages_in(result, senders), factor)
