"""The exchange of one bucket in one step: scatter, reduce, gather (docs/math.md, equations 1 to 5).

1. Every rank quantizes gradient + residual, cuts the blocks into one shard per rank and sends each shard to its owner
   (an alltoall of bytes).
2. The owner decodes the versions of its shard, sums them, adds the shard's residual and quantizes the sum.
3. An allgather of bytes returns it to everyone. All ranks decode the same bytes, and so hold the same bits.

Each half is asynchronous and named: nothing here blocks before `result` is called. Whatever the number of workers N,
a value costs a worker 2(N-1)/N * bits on the wire, and is quantized twice.
"""

from __future__ import annotations

import torch

from hvd_dyncomp import comm
from hvd_dyncomp.buckets import Bucket, Slot
from hvd_dyncomp.codec import (
    WIRE_VERSION,
    Header,
    Phase,
    header_tensor,
    message_bytes,
    noise_for,
    split_messages,
)
from hvd_dyncomp.kernels import reference


class Exchange:
    """One bucket, one step. Level and step are fixed at its creation: what moves them later does not reach it.

    Args:
        bucket: what travels.
        bits: level, below 32.
        step: number of the step, the same on all ranks.
        factor: what the sum over ranks is multiplied by (1/N for a mean).
        seed: for stochastic rounding; None rounds to nearest.
        process_set: Horovod's, of the optimizer.

    Attributes:
        sent_bytes: what this rank sends for the exchange, headers and scales included.
    """

    def __init__(self, bucket: Bucket, *, bits: int, step: int, factor: float, seed: int | None, process_set) -> None:
        self._bucket, self._bits, self._step, self._factor = bucket, bits, step, factor
        self._seed, self._process_set = seed, process_set
        self._gradient = torch.zeros(bucket.blocks * bucket.block_size, dtype=torch.float32, device=bucket.device)
        self._missing = {slot.name for slot in bucket.slots}
        self._scatter: int | None = None
        self._gather: int | None = None
        self._error: Exception | None = None
        self._mean: torch.Tensor | None = None
        self._where = f"bucket {bucket.name}"
        self.sent_bytes = 0

    def add(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Takes one parameter's gradient, of any strides and floating dtype; the last one starts the scatter."""
        # View the flat range as the parameter and copy: element order is logical whatever the gradient's strides.
        self._gradient[slot.range].view(slot.shape).copy_(gradient)
        self._missing.discard(slot.name)
        if not self._missing:
            self.start()

    def start(self) -> None:
        """Starts the scatter, with zeros for gradients that have not come. Does nothing the second time."""
        if self._scatter is not None:
            return
        bucket = self._bucket
        payload = self._encode(self._gradient, bucket.residuals and bucket.residuals.own, Phase.SCATTER, 0)
        bucket.keep_residuals()
        messages, splits = [], []
        for first, last in zip(bucket.bounds, bucket.bounds[1:], strict=False):
            header = header_tensor(self._header(Phase.SCATTER, last - first), bucket.device)
            messages += [header, payload[first:last].view(-1)]
            splits.append(message_bytes(last - first, self._bits, bucket.block_size))
        self.sent_bytes += sum(splits) - splits[bucket.rank]
        self._scatter = comm.start_alltoall(torch.cat(messages), splits, self._name("scatter"), self._process_set)

    def advance(self, block: bool = False) -> None:
        """Starts the gather once the scatter has arrived; with `block`, waits for that.

        An error is kept for `result`: raised here, in a backward hook, it would reach the ranks at different points.
        The others, who wait for this rank's shard, are told.
        """
        if self._scatter is None or self._gather is not None:
            return
        if not (block or comm.poll(self._scatter)):
            return
        received = comm.wait(self._scatter)
        try:
            message = self._reduce(received)
        except Exception as error:  # noqa: BLE001  # raised again by result()
            self._error = error
            message = header_tensor(self._header(Phase.ABORT, 0), self._bucket.device)
        self.sent_bytes += message.numel() * (self._bucket.world_size - 1)
        self._gather = comm.start_allgather(message, self._name("gather"), self._process_set)

    def _reduce(self, received: torch.Tensor) -> torch.Tensor:
        """From all versions of this rank's shard to the message with their sum."""
        bucket = self._bucket
        own = bucket.bounds[bucket.rank + 1] - bucket.bounds[bucket.rank]
        expected = [self._header(Phase.SCATTER, own)] * bucket.world_size
        versions = torch.stack(split_messages(received, expected, bucket.block_size, self._where))
        total = reference.decode_sum(versions, bits=self._bits, block_size=bucket.block_size)
        residual = bucket.residuals and bucket.residuals.shard
        payload = self._encode(total, residual, Phase.GATHER, bucket.own_range.start)
        return torch.cat([header_tensor(self._header(Phase.GATHER, own), bucket.device), payload.view(-1)])

    def result(self, slot: Slot) -> torch.Tensor:
        """The reduced gradient of one parameter, float32, valid until the exchange is gone. Blocks until it is here.

        Raises:
            LockstepError: the ranks disagree about level, step or bucket.
        """
        return self.finish()[slot.range].view(slot.shape)

    def finish(self) -> torch.Tensor:
        """Waits for the end of the exchange; returns the whole bucket's mean. Raises as `result` does."""
        if self._mean is not None:
            return self._mean
        self.start()
        self.advance(block=True)
        if self._error is not None:
            raise self._error
        bucket = self._bucket
        counts = [last - first for first, last in zip(bucket.bounds, bucket.bounds[1:], strict=False)]
        expected = [self._header(Phase.GATHER, count) for count in counts]
        received = comm.wait(self._gather)  # type: ignore[arg-type]  # advance() has set it
        shards = torch.cat(split_messages(received, expected, bucket.block_size, self._where))
        self._mean = reference.decode(shards, bits=self._bits, block_size=bucket.block_size, factor=self._factor)
        return self._mean

    @property
    def untouched(self) -> bool:
        """Whether no gradient has come: all its parameters have sparse gradients, which Horovod exchanges itself."""
        return len(self._missing) == len(self._bucket.slots)

    def _encode(self, values: torch.Tensor, residual, phase: Phase, first: int) -> torch.Tensor:
        noise = None
        if self._seed is not None:
            message = f"{self._bucket.name}/{phase.name}"
            noise = noise_for(self._seed, self._bucket.rank, self._step, message, first)
        return reference.encode(values, residual, bits=self._bits, block_size=self._bucket.block_size, noise=noise)

    def _header(self, phase: Phase, blocks: int) -> Header:
        return Header(WIRE_VERSION, phase, self._bits, self._bucket.plan, self._step & 0xFFFFFFFF, blocks)

    def _name(self, phase: str) -> str:
        return f"hvd_dyncomp.{self._bucket.name}.{phase}"
