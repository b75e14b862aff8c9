"""All that one training step has in flight."""

from __future__ import annotations

import logging

import torch

from hvd_dyncomp.exchange.base import Exchange
from hvd_dyncomp.exchange.binding import Binding
from hvd_dyncomp.exchange.buckets import Bucket, Slot
from hvd_dyncomp.exchange.handshake import Handshake
from hvd_dyncomp.exchange.sharded import ShardedExchange
from hvd_dyncomp.exchange.whole import WholeExchange
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Traffic, allreduce_bytes

logger = logging.getLogger(__name__)

# What Horovod's allreduce takes on CPUs.
_HOROVOD_FLOATS = (torch.float16, torch.float32, torch.float64)


class Step:
    """The gradients of one step, from the first `compress` to the last `decompress`.

    Args:
        binding: the optimizer.
        buckets: its buckets.
        bits: the level of the step; what the controller does meanwhile concerns the next one.
        choice: for the handshake.
        number: of the step, the same on all ranks.
        seed: for stochastic rounding, or None.
        traffic: where its bytes are counted.

    Attributes:
        submitted: names of the parameters whose gradients have come.
        choice: rank 0's, once `collect` has been called.
    """

    def __init__(
        self,
        binding: Binding,
        buckets: list[Bucket],
        *,
        bits: int,
        choice: int,
        number: int,
        seed: int | None,
        traffic: Traffic,
    ) -> None:
        self._world_size, self._buckets = binding.world_size, buckets
        self.bits, self.traffic, self._number = bits, traffic, number
        self.submitted: set[str] = set()
        self.choice = 0
        self._collected = False
        self._handshake = Handshake(buckets, bits=bits, choice=choice, step=number, binding=binding)
        self._exchanges: list[Exchange] = []
        self._under_way: list[Exchange] = []
        traffic.steps += 1
        if bits == UNCOMPRESSED:
            for bucket in buckets:
                if bucket.carries:
                    bucket.release_residuals()
            return
        for bucket in buckets:
            way = ShardedExchange if bucket.sharded else WholeExchange
            self._exchanges.append(
                way(bucket, bits=bits, step=number, factor=binding.factor, seed=seed, process_set=binding.process_set)
            )
            traffic.float32_bytes += allreduce_bytes(4 * bucket.values, self._world_size)
            traffic.compressed_values += bucket.values
        self._under_way = list(self._exchanges)

    def add(self, gradient: torch.Tensor, slot: Slot) -> torch.Tensor:
        """Takes a gradient that travels compressed; returns the ticket that Horovod is to reduce in its place."""
        self._exchanges[slot.bucket].add(slot, gradient)
        # Before it is known that all ranks do the same, nothing is sent that only fits if they do.
        if self._handshake.agreed():
            self._under_way = [exchange for exchange in self._under_way if not exchange.advance()]
        self.traffic.uncompressed_bytes += allreduce_bytes(4, self._world_size)
        return self._buckets[slot.bucket].tickets[slot.index]

    def pass_uncompressed(self, gradient: torch.Tensor, slot: Slot | None) -> torch.Tensor:
        """What Horovod reduces for a small tensor, or at 32 bits; with what its residual has left to deliver."""
        residual = self._buckets[slot.bucket].take_residual(slot) if slot else None
        wire = gradient if residual is None else gradient + residual
        if wire.is_floating_point() and wire.dtype not in _HOROVOD_FLOATS:
            wire = wire.float()
        wire = wire.contiguous()  # Horovod refuses other strides
        self.traffic.uncompressed_bytes += allreduce_bytes(wire.numel() * wire.element_size(), self._world_size)
        self.traffic.float32_bytes += allreduce_bytes(wire.numel() * 4, self._world_size)
        return wire

    def collect(self) -> None:
        """Ends all exchanges. Called when every gradient of the step is in, so that each wait has an end.

        Raises:
            LockstepError: the ranks disagree about level, step or parameters.
        """
        if self._collected:
            return
        self._collected = True
        # First of all: ranks that disagree wait for exchanges that never come.
        self.choice = self._handshake.check()
        for exchange in self._exchanges:
            exchange.start()
        # All that others wait for goes out before this rank waits for what it needs itself.
        for exchange in self._exchanges:
            exchange.forward()
        for exchange in self._exchanges:
            exchange.deliver()
        if self.bits == UNCOMPRESSED:
            self.traffic.uncompressed_bytes += self._handshake.sent_bytes
            for bucket in self._buckets:
                bucket.carries = False
        else:
            self.traffic.compressed_bytes += self._handshake.sent_bytes
            self.traffic.compressed_bytes += sum(exchange.sent_bytes for exchange in self._exchanges)
            self._note_nonfinite(sum(exchange.nonfinite_blocks for exchange in self._exchanges))

    def _note_nonfinite(self, blocks: int) -> None:
        """Counts blocks that are not finite; says so once for each record of the meter, that is epoch and level."""
        if blocks and not self.traffic.nonfinite_blocks:
            logger.warning(
                "step %d: NaN or infinity in %d blocks of gradients, which reach every rank as NaN and leave residuals "
                "as they were; more of them in this epoch are counted in the meter only (nonfinite_blocks)",
                self._number,
                blocks,
            )
        self.traffic.nonfinite_blocks += blocks
