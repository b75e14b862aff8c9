"""The reduction of two workers: each sends the other its whole section, and both sum.

With two workers this costs the bytes of scatter, reduce, gather, 2(N-1)/N * bits = bits a value, and needs one
quantization and one collective less. With more it would cost (N-1) * bits.

By an alltoall: Horovod fuses allgathers that it finds together, and nothing could be decoded before all has come.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.exchange.codec import Phase, Span
from hvd_dyncomp.exchange.ranges import marked
from hvd_dyncomp.exchange.reduction import Course, Outgoing, Reduction


class PairReduction(Reduction):
    """See the module."""

    _first_messages = 1

    @marked("encode")
    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        bucket, span = self._bucket, self.section.span
        message, [payload], lengths = self._messages.codes(Phase.PAIR, [span])
        residual, noise = bucket.residuals and bucket.residuals.own, self._messages.noise(Phase.PAIR)
        self._messages.coding.encode(payload, span, values, residual, origin=origin, noise=noise)
        bucket.keep_residuals()
        bucket.streams.keep(message)
        self._own = message
        return message, lengths

    def _start(self, messages: torch.Tensor, lengths: list[int]) -> Any:
        [length] = lengths
        to_the_other = [0 if rank == self._bucket.rank else length for rank in self.section.ranks]
        return self._group.alltoall(messages, to_the_other, self._messages.name(Phase.PAIR))

    def _rest(self, handle: Any, failure: Exception | None) -> Course[torch.Tensor]:
        if failure is not None:
            raise failure
        received = yield handle
        both = [self._own if rank == self._bucket.rank else received for rank in self.section.ranks]
        return torch.cat(both)

    @property
    def _result(self) -> tuple[Phase, list[Span]]:
        return Phase.PAIR, [self.section.span] * len(self.section.ranks)

    @marked("decode")
    def decode(
        self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]
    ) -> torch.Tensor:
        # In the order of the ranks, so that all replicas hold the same bits.
        return self._messages.coding.decode(values, self.section.span, self.messages_in(result, senders), factor)
