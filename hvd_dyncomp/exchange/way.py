"""How the values of a bucket become their sum over all ranks: the contract, and the flat way, among all at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from hvd_dyncomp.exchange.group import Group
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.pair import PairReduction
from hvd_dyncomp.exchange.reduction import Course, Outgoing, Reduction
from hvd_dyncomp.exchange.sharded import ShardedReduction
from hvd_dyncomp.exchange.topology import Section
from hvd_dyncomp.transport.base import Transport

Values = Callable[[], list[torch.Tensor]]


class Way(ABC):
    """One bucket in one step.

    Attributes:
        groups: who talks among themselves, with what they have sent.
    """

    groups: list[Group]

    @abstractmethod
    def prepare(self, values: list[torch.Tensor]) -> None:
        """Makes the first messages from the bucket's values, contiguous float32 tensors. Sends nothing."""

    @abstractmethod
    def course(self, values: Values, factor: float) -> Course[torch.Tensor]:
        """All collectives; writes the sum, times `factor`, into the values; returns how many blocks are not finite.

        That is an int64 on the values' device.

        Args:
            values: as `prepare` takes them, which is called first if it has not been.
        """


def reduction(messages: Messages, section: Section, group: Group | None) -> Reduction:
    """The right one for so many ranks."""
    return (ShardedReduction if section.sharded else PairReduction)(messages, section, group)


class Flat(Way):
    """All ranks reduce all blocks."""

    def __init__(self, messages: Messages, transport: Transport) -> None:
        arrangement = messages.bucket.arrangement
        [section] = arrangement.sections
        self.groups = [Group(transport, section.ranks, arrangement.neighbours)]
        self._reduction = reduction(messages, section, self.groups[0])
        self._outgoing: Outgoing | None = None

    def prepare(self, values: list[torch.Tensor]) -> None:
        self._outgoing = self._reduction.encode(values)

    def course(self, values: Values, factor: float) -> Course[torch.Tensor]:
        def encode() -> Outgoing:
            outgoing, self._outgoing = self._outgoing, None  # the reduction has it, and lets it go
            return outgoing or self._reduction.encode(values())

        result = yield from self._reduction.course(encode)
        return self._reduction.decode(result, values(), factor, self._reduction.section.ranks)
