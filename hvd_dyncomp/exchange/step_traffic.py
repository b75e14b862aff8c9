"""Counts what one step sends, in the meter."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.meter import Meter, Traffic, allreduce_bytes
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.group import Group


def float32_bytes(tensor: torch.Tensor) -> int:
    """What a tensor's values are as float32; of complex ones there are two."""
    return 4 * tensor.numel() * (2 if tensor.is_complex() else 1)


def count_outside(tensor: torch.Tensor, traffic: Traffic, transport: Transport) -> None:
    """Count a tensor that Horovod reduces unchanged, outside any step, where no topology is known."""
    size, neighbours = transport.size, transport.local_size
    hosts = -(-size // neighbours)  # as if all had as many workers as this one
    nbytes, plain = tensor.numel() * tensor.element_size(), float32_bytes(tensor)
    traffic.uncompressed_bytes += allreduce_bytes(nbytes, size)
    traffic.leaving_bytes += allreduce_bytes(nbytes, hosts) / neighbours
    traffic.float32_bytes += allreduce_bytes(plain, size)
    traffic.float32_leaving_bytes += allreduce_bytes(plain, hosts) / neighbours


class StepTraffic:
    """The counts of one step.

    Args:
        plan: the buckets.
        meter: takes the counts.
        epoch, bits: of the step.

    Attributes:
        traffic: the record of epoch and level.
    """

    def __init__(self, plan: Plan, meter: Meter, *, epoch: int, bits: float) -> None:
        self._plan = plan
        self.traffic = meter.at(epoch, bits)
        self._uncompressed_bytes = 0
        self._float32_bytes = 0  # of all that is reduced in this step, if it was float32

    def compresses(self, buckets: Iterable[Bucket]) -> None:
        """Note that these buckets travel compressed."""
        self._float32_bytes += sum(4 * bucket.values for bucket in buckets)

    def hands_over(self, nbytes: int, float32_bytes: int) -> None:
        """Note that a gradient will be reduced uncompressed, in `nbytes` bytes, as float32 in `float32_bytes`."""
        self._uncompressed_bytes += nbytes
        self._float32_bytes += float32_bytes

    def reduced(self) -> None:
        """Count what was handed over."""
        self.count_reduced(self._uncompressed_bytes, self._float32_bytes)

    def exchanged(self, bucket: Bucket, groups: Iterable[Group]) -> None:
        """Count a bucket's messages."""
        self.traffic.compressed_values += bucket.values
        for group in groups:
            self.traffic.compressed_bytes += group.sent_bytes
            self.traffic.leaving_bytes += group.leaving_bytes

    def shook_hands(self, nbytes: int, *, compressed: bool) -> None:
        """Count the allreduce of a handshake: as compressed bytes unless the step is uncompressed."""
        if not compressed:
            self.count_reduced(nbytes)
            return
        self.traffic.compressed_bytes += allreduce_bytes(nbytes, self._plan.source.world_size)
        self.traffic.leaving_bytes += self._plan.topology.leaving(nbytes, self._plan.source.rank)

    def count_reduced(self, nbytes: float, float32_bytes: float = 0) -> None:
        size, topology, rank = self._plan.source.world_size, self._plan.topology, self._plan.source.rank
        self.traffic.uncompressed_bytes += allreduce_bytes(nbytes, size)
        self.traffic.leaving_bytes += topology.leaving(nbytes, rank)
        self.traffic.float32_bytes += allreduce_bytes(float32_bytes, size)
        self.traffic.float32_leaving_bytes += topology.leaving(float32_bytes, rank)
