"""How a bucket's values become their sum over all ranks: among all at once, or within hosts and between them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.coding import Values
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.reduction import PairReduction, Reduction, ShardedReduction
from hvd_dyncomp.exchange.task import Collectives, Gate
from hvd_dyncomp.exchange.topology import Section, dtype_within_host
from hvd_dyncomp.exchange.wire import Phase
from hvd_dyncomp.ranges import marked
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.group import Group


class Route(ABC):
    """The route of one bucket in one step.

    Attributes:
        groups: the groups of ranks that communicate, with what they have sent.
    """

    groups: list[Group]

    @abstractmethod
    def collectives(self, values: list[torch.Tensor]) -> Collectives[torch.Tensor]:
        """Run all collectives; return the bytes that `decode` takes.

        Args:
            values: contiguous float32 tensors, by slot.
        """

    @abstractmethod
    def decode(self, result: torch.Tensor, values: list[torch.Tensor], factor: float) -> None:
        """Write the sum times `factor` into the values.

        Args:
            result: what `collectives` returned.
            values: contiguous float32 tensors, by slot.
            factor: multiplies the sum.
        """


def route_of(messages: Messages, transport: Transport) -> Route:
    """The route that fits the bucket's arrangement."""
    return (Hierarchical if messages.bucket.arrangement.hierarchical else Flat)(messages, transport)


def _reduction(messages: Messages, section: Section) -> Reduction:
    """The reduction for the section's number of ranks."""
    return (ShardedReduction if section.sharded else PairReduction)(messages, section)


class Flat(Route):
    """All ranks reduce all blocks."""

    def __init__(self, messages: Messages, transport: Transport) -> None:
        arrangement = messages.bucket.arrangement
        [section] = arrangement.sections
        self.groups = [Group(transport, section.ranks, arrangement.host_ranks)]
        self._reduction, self._starts = _reduction(messages, section), messages.bucket.starts

    def collectives(self, values: list[torch.Tensor]) -> Collectives[torch.Tensor]:
        return self._reduction.collectives(self.groups[0], Values(self._starts, values))

    def decode(self, result: torch.Tensor, values: list[torch.Tensor], factor: float) -> None:
        self._reduction.decode(result, Values(self._starts, values), factor, self._reduction.section.ranks)


class Hierarchical(Route):
    """On hosts of several workers: within hosts, between hosts, within hosts (docs/math.md, equation 9).

    1. Every rank sends each neighbour on its host the values of that neighbour's section; the owner sums them.
    2. The owner reduces its section of the host's sum with the owners of the same section on other hosts, as all ranks
       do in the flat exchange: at the controller's level, with error feedback.
    3. The owner sends the result to its neighbours unchanged, as codes. All ranks decode the same bytes.

    So what leaves a host does not grow with its workers, and a worker quantizes only its section. Within a host, values
    travel as bfloat16 at levels up to 7 bits, where its rounding is small in comparison, and as float32 above;
    docs/design.md has the cost of the alternatives.
    """

    def __init__(self, messages: Messages, transport: Transport) -> None:
        arrangement = messages.bucket.arrangement
        self._messages, self._bucket, self._arrangement = messages, messages.bucket, arrangement
        neighbours, own = arrangement.host_ranks, arrangement.sections[arrangement.own]
        self._neighbours = Group(transport, neighbours, neighbours)
        self._peers = Group(transport, own.ranks, neighbours)
        self.groups = [self._neighbours, self._peers]
        self._reductions = [_reduction(messages, section) for section in arrangement.sections]
        self._own = self._reductions[arrangement.own]
        self._dtype = dtype_within_host(messages.bits)
        self._lengths = messages.lengths(self._sizes(arrangement.sections))
        to_owner = self._lengths[arrangement.own]
        self._lengths[arrangement.own] = 0
        self._arriving = [0 if rank == self._bucket.rank else to_owner for rank in neighbours]
        self._result_lengths = [reduction.result_bytes for reduction in self._reductions]

    def collectives(self, values: list[torch.Tensor]) -> Collectives[torch.Tensor]:
        messages = self._scatter(values)
        yield Gate.SEND
        name = self._messages.name(Phase.LOCAL_SCATTER)
        handle = self._neighbours.alltoall(messages, self._lengths, self._arriving, name)
        del messages  # the transport has them
        received = yield handle
        sums = self._add(values, received)  # of this rank's section, over its host
        del received, values
        between = self._own.collectives(self._peers, sums)
        del sums  # when they are quantized, nobody needs them any more
        result = yield from between
        self._own.messages_in(result, self._own.section.ranks)  # only here is it known which rank has sent a wrong one
        name = self._messages.name(Phase.LOCAL_GATHER)
        return (yield self._neighbours.allgather(result, self._result_lengths, name))

    @marked("scatter_on_host")
    def _scatter(self, values: list[torch.Tensor]) -> torch.Tensor:
        """Messages with the neighbours' sections."""
        messages, payloads, _ = self._messages.room(self._sizes(self._others))
        for section, payload in zip(self._others, payloads, strict=True):
            message = payload.view(self._dtype)
            for _, places, part in self._parts(values, section):
                message[places] = part
        return messages

    @property
    def _others(self) -> list[Section]:
        """The neighbours' sections."""
        return [section for section in self._arrangement.sections if section is not self._own.section]

    def _sizes(self, sections: Sequence[Section]) -> list[int]:
        """The bytes of sections' values within the host, without headers."""
        return [self._size(section) * self._dtype.itemsize for section in sections]

    def _size(self, section: Section) -> int:
        """The values of a section, without padding."""
        return sum(end - begin for _, begin, end in self._bucket.parts(section.span))

    def _parts(self, values: list[torch.Tensor], section: Section) -> Iterator[tuple[int, slice, torch.Tensor]]:
        """A section's values, by slot: the first one's place in the bucket, theirs in the section, and the values."""
        place = 0
        for slot, begin, end in self._bucket.parts(section.span):
            part = values[slot.index].detach().view(-1)[begin - slot.start : end - slot.start]
            yield begin, slice(place, place + len(part)), part
            place += len(part)

    @marked("sum_on_host")
    def _add(self, values: list[torch.Tensor], received: torch.Tensor) -> Values:
        """This rank's values of its section, plus the neighbours' in the order of their ranks.

        Its own are read only now: while a rank waits for its neighbours, it holds what it sends and no second copy.
        """
        section = self._own.section
        others = [rank for rank in self._neighbours.ranks if rank != self._bucket.rank]
        sizes = self._sizes([section]) * len(others)
        payloads = self._messages.payloads(received, sizes, others)
        first, *more = [payload.view(self._dtype) for payload in payloads]
        total = torch.empty(self._size(section), dtype=torch.float32, device=self._bucket.device)
        sums = Values([], [])
        for start, places, part in self._parts(values, section):
            sums.starts.append(start)
            sums.tensors.append(torch.add(part, first[places], out=total[places]))
        for version in more:
            total += version
        return sums

    def decode(self, result: torch.Tensor, values: list[torch.Tensor], factor: float) -> None:
        start, whole = 0, Values(self._bucket.starts, values)
        for owner, section in zip(self._arrangement.host_ranks, self._reductions, strict=True):
            own = result[start : start + section.result_bytes]
            section.decode(own, whole, factor, (owner,) * len(section.section.ranks))
            start += section.result_bytes
        if start != result.numel():
            raise LockstepError(f"{self._messages.where}: {result.numel()} bytes arrived, expected {start}")
