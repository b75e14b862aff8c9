"""Counts what one step sends, in the meter: by epoch and level, and by tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.meter import Meter, Sent, Traffic, allreduce_bytes
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.group import Group


def count_outside(tensor: torch.Tensor, traffic: Traffic, transport: Transport) -> None:
    """Count a tensor that Horovod reduces unchanged, outside any step, where no topology is known."""
    size, neighbours = transport.size, transport.local_size
    hosts = -(-size // neighbours)  # as if all had as many workers as this one
    nbytes, float32_bytes = tensor.numel() * tensor.element_size(), tensor.numel() * 4
    traffic.uncompressed_bytes += allreduce_bytes(nbytes, size)
    traffic.leaving_bytes += allreduce_bytes(nbytes, hosts) / neighbours
    traffic.float32_bytes += allreduce_bytes(float32_bytes, size)
    traffic.float32_leaving_bytes += allreduce_bytes(float32_bytes, hosts) / neighbours


class Tally:
    """The counts of one step. What belongs to no tensor (handshake, tickets) is only in the record of epoch and level.

    Args:
        plan: the buckets.
        meter: takes the counts.
        epoch, bits: of the step.

    Attributes:
        traffic: the record of epoch and level.
    """

    def __init__(self, plan: Plan, meter: Meter, *, epoch: int, bits: float) -> None:
        self._plan, self._bits, self._tensors = plan, bits, meter.tensors
        self.traffic = meter.at(epoch, bits)
        self.traffic.steps += 1
        # What Horovod is to reduce for this step, by tensor, which may be handed over again.
        self._uncompressed: dict[str, int] = {}
        self._float32_bytes = 0  # all of it, if it was float32

    def compresses(self, buckets: Iterable[Bucket]) -> None:
        """Note that these buckets travel compressed."""
        self._float32_bytes += sum(4 * bucket.values for bucket in buckets)

    def hands_over(self, name: str, nbytes: int, float32_bytes: int) -> None:
        """Note that Horovod will reduce a parameter's gradient in `nbytes` bytes, as float32 in `float32_bytes`."""
        if name not in self._uncompressed:
            self._float32_bytes += float32_bytes
        self._uncompressed[name] = nbytes

    def reduced(self, tickets: int) -> None:
        """Count what Horovod was given to reduce, and `tickets` bytes of tickets."""
        self._count_reduced(tickets + sum(self._uncompressed.values()), self._float32_bytes)
        self._divide_reduced(self._uncompressed)

    def reduced_again(self, nbytes: int, handshake_bytes: int) -> None:
        """Count our own allreduce of gradients that no backward has made, and its handshake."""
        self._count_reduced(nbytes + handshake_bytes)

    def exchanged(self, bucket: Bucket, groups: Iterable[Group]) -> None:
        """Count a bucket's messages, divided among tensors in proportion to the lengths of their codes."""
        sent = leaving = 0
        for group in groups:
            sent += group.sent_bytes
            leaving += group.leaving_bytes
        self.traffic.compressed_values += bucket.values
        self.traffic.compressed_bytes += sent
        self.traffic.leaving_bytes += leaving
        for name, share in bucket.shares(self._bits).items():
            own = self._tensor(name)
            own.sent_bytes += share * sent
            own.leaving_bytes += share * leaving

    def shook_hands(self, nbytes: int, *, compressed: bool) -> None:
        """Count the allreduce of a handshake: as compressed bytes unless the step is uncompressed."""
        if not compressed:
            self._count_reduced(nbytes)
            return
        self.traffic.compressed_bytes += allreduce_bytes(nbytes, self._plan.source.world_size)
        self.traffic.leaving_bytes += self._plan.topology.leaving(nbytes, self._plan.source.rank)

    def _tensor(self, name: str) -> Sent:
        key = name, self._bits
        if key not in self._tensors:
            self._tensors[key] = Sent()
        return self._tensors[key]

    def _count_reduced(self, nbytes: float, float32_bytes: float = 0) -> None:
        size, topology, rank = self._plan.source.world_size, self._plan.topology, self._plan.source.rank
        self.traffic.uncompressed_bytes += allreduce_bytes(nbytes, size)
        self.traffic.leaving_bytes += topology.leaving(nbytes, rank)
        self.traffic.float32_bytes += allreduce_bytes(float32_bytes, size)
        self.traffic.float32_leaving_bytes += topology.leaving(float32_bytes, rank)

    def _divide_reduced(self, bytes_by_name: Mapping[str, int]) -> None:
        sent = allreduce_bytes(1, self._plan.source.world_size)
        leaving = self._plan.topology.leaving(1, self._plan.source.rank)
        for name, nbytes in bytes_by_name.items():
            slot = self._plan.slots.get(name)
            own = self._tensor(slot.counted_as if slot else name)  # a skipped tensor counts under its own name
            own.sent_bytes += sent * nbytes
            own.leaving_bytes += leaving * nbytes
