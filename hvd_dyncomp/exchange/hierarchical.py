"""The exchange on hosts of several workers: within hosts, between them, within hosts (docs/math.md, equation 9).

1. Every rank sends each neighbour on its host the values of that neighbour's section; the owner sums them up.
2. The owner reduces its section of the host's sum with those who own the same section on other hosts, as all ranks
   would do in the flat way: at the controller's level, with error feedback.
3. The owner hands what has come of it to its neighbours as it is, in codes. Everyone decodes the same bytes.

So what leaves a host does not grow with the number of its workers, and a worker quantizes its section only. Within a
host values travel as bfloat16 at levels (or budgets) up to 7 bits, beside which its rounding is small, and as float32
above;docs/design.md has what the alternatives cost.
"""

from __future__ import annotations

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.codec import Phase
from hvd_dyncomp.exchange.group import Group
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.ranges import marked
from hvd_dyncomp.exchange.reduction import Course, Outgoing
from hvd_dyncomp.exchange.topology import Section, dtype_within_host
from hvd_dyncomp.exchange.way import Values, Way, reduction
from hvd_dyncomp.transport.base import Transport


class Hierarchical(Way):
    """See the module."""

    def __init__(self, messages: Messages, transport: Transport) -> None:
        arrangement = messages.bucket.arrangement
        self._messages, self._bucket, self._arrangement = messages, messages.bucket, arrangement
        near, own = arrangement.neighbours, arrangement.sections[arrangement.own]
        self._neighbours, self._peers = Group(transport, near, near), Group(transport, own.ranks, near)
        self.groups = [self._neighbours, self._peers]
        self._reductions = [
            reduction(messages, section, self._peers if section is own else None) for section in arrangement.sections
        ]
        self._own = self._reductions[arrangement.own]
        self._dtype = dtype_within_host(messages.bits)
        self._outgoing: Outgoing | None = None
        self._sum = torch.empty(0)

    @marked("scatter_on_host")
    def prepare(self, values: list[torch.Tensor]) -> None:
        others = [section for section in self._arrangement.sections if section is not self._own.section]
        sizes = [self._size(section) * self._dtype.itemsize for section in others]
        messages, payloads, lengths = self._messages.room(Phase.LOCAL_SCATTER, [s.blocks for s in others], sizes)
        self._sum = torch.empty(self._size(self._own.section), dtype=torch.float32, device=self._bucket.device)
        self._bucket.streams.keep(self._sum)
        values = self._bucket.with_debts(values)
        for section, payload in zip(others, payloads, strict=True):
            self._copy(values, section, payload.view(self._dtype))
        self._copy(values, self._own.section, self._sum)
        lengths.insert(self._arrangement.own, 0)
        self._outgoing = messages, lengths

    def course(self, values: Values, factor: float) -> Course[torch.Tensor]:
        failure: Exception | None = None
        try:
            if self._outgoing is None:
                self.prepare(values())
            messages, lengths = self._outgoing  # type: ignore[misc]  # prepare has made it
        except Exception as error:  # noqa: BLE001  # the others wait: they are told, and then it is raised
            failure = error
            messages, lengths = self._messages.aborts(len(self._neighbours.ranks))
        handle = self._neighbours.alltoall(messages, lengths, self._messages.name(Phase.LOCAL_SCATTER))
        del messages
        self._outgoing = None
        received: torch.Tensor | None = None
        try:
            received = yield handle
        except Exception as error:  # noqa: BLE001  # the step was given up
            failure = error

        def encode() -> Outgoing:
            nonlocal received
            if failure is not None:
                raise failure
            self._add(received)  # type: ignore[arg-type]  # encode is called once
            outgoing = self._own.encode([self._sum], self._own.section.first * self._bucket.block_size)
            self._sum, received = torch.empty(0), None  # the rest takes a while
            return outgoing

        try:
            result = yield from self._own.course(encode)
            self._own.messages_in(result, self._own.section.ranks)  # who is to blame is known here, not to neighbours
        except Exception as error:  # noqa: BLE001
            failure, (result, _) = error, self._messages.aborts(1)
        handle = self._neighbours.allgather(result, self._messages.name(Phase.LOCAL_GATHER))
        if failure is not None:
            raise failure
        return self._decode((yield handle), values(), factor)

    def _size(self, section: Section) -> int:
        """The values of a section, without padding."""
        first = section.first * self._bucket.block_size
        return max(0, min(section.blocks * self._bucket.block_size, self._bucket.values - first))

    def _copy(self, values: list[torch.Tensor], section: Section, into: torch.Tensor) -> None:
        first = section.first * self._bucket.block_size
        last = first + into.numel()
        for slot, value in zip(self._bucket.slots, values, strict=True):
            begin, end = max(first, slot.start), min(last, slot.start + slot.numel)
            if begin < end:
                into[begin - first : end - first] = value.view(-1)[begin - slot.start : end - slot.start]

    @marked("sum_on_host")
    def _add(self, received: torch.Tensor) -> None:
        """The neighbours' versions of this rank's section, in the order of their ranks."""
        section = self._own.section
        others = [rank for rank in self._neighbours.ranks if rank != self._bucket.rank]
        header = self._messages.header(Phase.LOCAL_SCATTER, section.blocks)
        sizes = [self._size(section) * self._dtype.itemsize] * len(others)
        for version in self._messages.cut(received, [header] * len(others), sizes, others):
            self._sum += version.view(self._dtype)

    def _decode(self, gathered: torch.Tensor, values: list[torch.Tensor], factor: float) -> torch.Tensor:
        counts, start = [], 0
        for owner, section in zip(self._arrangement.neighbours, self._reductions, strict=True):
            result = gathered[start : start + section.result_bytes]
            counts.append(section.decode(result, values, factor, (owner,) * len(section.section.ranks)))
            start += section.result_bytes
        if start != gathered.numel():
            raise LockstepError(f"{self._messages.where}: {gathered.numel()} bytes arrived, expected {start}")
        return torch.stack(counts).sum()
