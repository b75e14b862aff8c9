"""Reduction of a section of a bucket among a group of ranks: the result is bytes that all ranks decode to one sum."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hvd_dyncomp.exchange.coding import Span, Values
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.task import Collectives, Gate
from hvd_dyncomp.exchange.topology import Section
from hvd_dyncomp.exchange.wire import Phase
from hvd_dyncomp.ranges import marked
from hvd_dyncomp.transport.group import Group

Outgoing = tuple[torch.Tensor, list[int]]  # messages one after the other, and their lengths


class Reduction(ABC):
    """The reduction of one section in one step.

    Args:
        messages: of the bucket.
        section: the blocks.

    Attributes:
        section: see above.
    """

    def __init__(self, messages: Messages, section: Section) -> None:
        self._messages, self.section = messages, section
        self._bucket = messages.bucket
        # This rank's in the section, if it has one there.
        self._place = section.ranks.index(self._bucket.rank) if self._bucket.rank in section.ranks else -1

    @property
    def result_bytes(self) -> int:
        """Length of what `collectives` returns, bytes."""
        return sum(self._messages.lengths(self._sizes(self._result)))

    @abstractmethod
    def collectives(self, group: Group, values: Values) -> Collectives[torch.Tensor]:
        """Run all collectives; return the bytes that every rank then has.

        Args:
            group: the section's ranks.
            values: as in `encode`.
        """

    @abstractmethod
    def encode(self, values: Values) -> Outgoing:
        """Quantize the section with its residual.

        Args:
            values: those of the section, at least.
        """

    @property
    @abstractmethod
    def _result(self) -> list[Span]:
        """The blocks of the messages in the result, by rank of the section."""

    def _sizes(self, spans: list[Span]) -> list[int]:
        """The bytes of messages of codes, without their headers."""
        return [self._messages.coding.nbytes(span) for span in spans]

    @abstractmethod
    def decode(self, result: torch.Tensor, values: Values, factor: float, senders: tuple[int, ...]) -> None:
        """Write the sum, times `factor`, into the bucket's values.

        Args:
            result: what `collectives` returned, here or on another rank.
            values: of the whole bucket.
            factor: multiplies the sum.
            senders: the rank that sent each message, for error messages.

        Raises:
            LockstepError: a message is not as expected.
        """

    def messages_in(self, result: torch.Tensor, senders: tuple[int, ...]) -> list[torch.Tensor]:
        """The payloads in the result, by rank of the section; arguments and errors as in `decode`."""
        return self._messages.payloads(result, self._sizes(self._result), senders)


class PairReduction(Reduction):
    """Reduction between two workers: each sends the other its whole section, and both sum.

    With two workers this costs as many bytes as scatter, reduce and gather, 2(N-1)/N * bits = bits per value, and saves
    one quantization and one collective. With more workers it would cost (N-1) * bits.

    It uses an alltoall, because Horovod fuses allgathers that are ready together, and then nothing could be decoded
    before all had arrived.
    """

    @marked("encode")
    def encode(self, values: Values) -> Outgoing:
        bucket, span = self._bucket, self.section.span
        both, payloads, lengths = self._messages.room(self._sizes(self._result))  # the other's message overwrites one
        payload = payloads[self._place]
        dither = self._messages.dither(Phase.PAIR)
        residual = bucket.residuals.section()
        self._messages.coding.encode(payload, span, values, residual, dither=dither)
        bucket.residuals.quantized()
        return both, lengths

    def collectives(self, group: Group, values: Values) -> Collectives[torch.Tensor]:
        both, lengths = self.encode(values)
        del values
        yield Gate.SEND
        own, other = both.split(lengths)[:: 1 - 2 * self._place]
        to_the_other = [0 if rank == self._bucket.rank else len(own) for rank in self.section.ranks]
        received = yield group.alltoall(own, to_the_other, to_the_other, self._messages.name(Phase.PAIR), other)
        if len(received) != len(other):
            both = torch.cat([own, received])  # it is no message of this exchange, as `decode` will say
        return both

    @property
    def _result(self) -> list[Span]:
        return [self.section.span] * len(self.section.ranks)

    @marked("decode")
    def decode(self, result: torch.Tensor, values: Values, factor: float, senders: tuple[int, ...]) -> None:
        # In the order of the ranks, so that all replicas hold the same bits.
        self._messages.coding.decode(values, self.section.span, self.messages_in(result, senders), factor)


class ShardedReduction(Reduction):
    """Reduction in three parts: scatter, reduce, gather (docs/math.md, equations 1 to 5).

    1. Every rank quantizes gradient + residual, cuts the blocks into one shard per rank and sends each shard to its
       owner (an alltoall of bytes).
    2. The owner decodes the versions of its shard, sums them, adds the shard's residual and quantizes the sum.
    3. An allgather of bytes returns the sum to all ranks. They all decode the same bytes, and so hold the same bits.

    With any number of workers N, a value costs a worker 2(N-1)/N * bits on the wire, and is quantized twice.
    """

    @property
    def _in_one(self) -> bool:
        # On a GPU a call is a launch, and one per rank would keep the program busy. So codes are copied.
        return self._bucket.streams.late

    @marked("encode")
    def encode(self, values: Values) -> Outgoing:
        bucket, section = self._bucket, self.section
        coding, begin = self._messages.coding, section.first * bucket.block_size
        dither = self._messages.dither(Phase.SCATTER)
        if self._in_one:
            codes = torch.empty(coding.nbytes(section.span), dtype=torch.uint8, device=bucket.device)
            parts = [(section.span, codes)]
        else:
            messages, payloads, lengths = self._messages.room(self._sizes(section.shards))
            parts = list(zip(section.shards, payloads, strict=True))
        for shard, payload in parts:
            first, size = shard.first * bucket.block_size - begin, shard.blocks * bucket.block_size
            residual = bucket.residuals.section(slice(first, first + size))
            coding.encode(payload, shard, values, residual, dither=dither)
        if self._in_one:
            messages, lengths = self._messages.around(codes, self._sizes(section.shards))
        bucket.residuals.quantized()
        return messages, lengths

    def collectives(self, group: Group, values: Values) -> Collectives[torch.Tensor]:
        messages, lengths = self.encode(values)
        arriving = [lengths[self._place]] * len(lengths)
        del values
        yield Gate.SEND
        handle = group.alltoall(messages, lengths, arriving, self._messages.name(Phase.SCATTER))
        del messages  # the transport has them
        received = yield handle
        message = self._reduced(received)
        del received
        handle = group.allgather(message, lengths, self._messages.name(Phase.GATHER))
        del message
        return (yield handle)

    @marked("reduce")
    def _reduced(self, received: torch.Tensor) -> torch.Tensor:
        """The message with the sum of all versions of this rank's shard."""
        bucket, section = self._bucket, self.section
        own = section.shards[self._place]
        sizes = self._sizes([own])
        versions = self._messages.payloads(received, sizes * len(section.ranks), section.ranks)
        message, [payload], _ = self._messages.room(sizes)
        self._messages.coding.reduce(
            payload,
            own,
            versions,
            bucket.residuals.of_shard(),
            dither=self._messages.dither(Phase.GATHER),
        )
        return message

    @property
    def _result(self) -> list[Span]:
        return self.section.shards

    @marked("decode")
    def decode(self, result: torch.Tensor, values: Values, factor: float, senders: tuple[int, ...]) -> None:
        payloads, coding = self.messages_in(result, senders), self._messages.coding
        shards = self.section.shards
        if self._in_one:
            payloads, shards = [torch.cat(payloads)], [self.section.span]
        for shard, payload in zip(shards, payloads, strict=True):
            coding.decode(values, shard, [payload], factor)
