"""The reduction of two workers: each sends the other its whole section, and both sum.

With two workers this costs the bytes of scatter, reduce, gather, 2(N-1)/N * bits = bits a value, and needs one
quantization and one collective less. With more it would cost (N-1) * bits.
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.exchange.codec import Phase, Span
from hvd_dyncomp.exchange.reduction import Course, Outgoing, Reduction


class PairReduction(Reduction):
    """See the module."""

    _first_messages = 1

    def encode(self, values: list[torch.Tensor], origin: int = 0) -> Outgoing:
        bucket, span = self._bucket, self.section.span
        message, [payload], lengths = self._messages.codes(Phase.PAIR, [span])
        residual, noise = bucket.residuals and bucket.residuals.own, self._messages.noise(Phase.PAIR)
        self._messages.coding.encode(payload, span, values, residual, origin=origin, noise=noise)
        bucket.keep_residuals()
        return message, lengths

    def _start(self, messages: torch.Tensor, lengths: list[int]) -> Any:
        return self._group.allgather(messages, self._messages.name(Phase.PAIR))

    def _rest(self, handle: Any, failure: Exception | None) -> Course[torch.Tensor]:
        if failure is not None:
            raise failure
        return (yield handle)

    @property
    def _result(self) -> tuple[Phase, list[Span]]:
        return Phase.PAIR, [self.section.span] * len(self.section.ranks)

    def decode(self, result: torch.Tensor, values: list[torch.Tensor], factor: float, senders: tuple[int, ...]) -> int:
        # In the order of the ranks, so that all replicas hold the same bits.
        return self._messages.coding.decode(values, self.section.span, self.messages_in(result, senders), factor)
