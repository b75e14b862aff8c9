"""Buckets: which parameter's gradient travels where. Built once, the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from hvd_dyncomp.exchange.codec import checksum, message_bytes, shard_bounds
from hvd_dyncomp.exchange.settings import Skip
from hvd_dyncomp.kernels import bounded


@dataclass(frozen=True)
class Slot:
    """A parameter's place: the `index`-th of bucket `bucket`, with its values `start` to `start + numel`."""

    name: str
    shape: tuple[int, ...]
    bucket: int
    index: int
    start: int
    numel: int

    @property
    def range(self) -> slice:
        return slice(self.start, self.start + self.numel)


class Residuals(NamedTuple):
    """What the two quantizations of a bucket have yet to deliver.

    Attributes:
        own: (blocks * block_size,) float32, of this rank's gradient.
        shard: (values of this rank's shard,) float32, of the sum over ranks; empty where the exchange has no shards.
    """

    own: torch.Tensor
    shard: torch.Tensor


class Bucket:
    """Parameters that travel in one exchange, with what error feedback carries from step to step.

    Attributes:
        name: unique among the buckets of all optimizers of a process; part of the collectives' names.
        slots: its parameters, in order.
        values: gradient values in it.
        blocks: number of blocks; the last is padded with zeros.
        sharded: whether ranks reduce a shard each (`ShardedExchange`), or all of it (`PairExchange`).
        bounds: first block of each rank's shard, and the end.
        shards: blocks of each rank's shard.
        layout: checksum over parameters and block size: where which value is.
        composition: checksum over everything that the ranks must agree about, which is layout and world size.
        residuals: what error feedback carries; None without it.
        carries: whether the residuals may be non-zero.
        withheld: whether, since `release_residuals`, some have waited for a gradient that takes them along.
    """

    def __init__(
        self,
        slots: list[Slot],
        *,
        block_size: int,
        rank: int,
        world_size: int,
        error_feedback: bool,
        device: torch.device,
    ) -> None:
        self.name = slots[0].name
        self.slots = slots
        self.block_size, self.rank, self.world_size, self.device = block_size, rank, world_size, device
        self.values = slots[-1].start + slots[-1].numel
        self.blocks = -(-self.values // block_size)
        self.sharded = world_size > 2
        self.bounds = shard_bounds(self.blocks, world_size)
        self.shards = [last - first for first, last in zip(self.bounds, self.bounds[1:], strict=False)]
        self._tickets = torch.zeros(len(slots), dtype=torch.float32, device=device)
        self._each_ticket = list(self._tickets.split(1))
        # Written once a gradient: on the CPU, an operator of torch's for one value costs more than all else.
        self._ticket_values = self._tickets.numpy() if device.type == "cpu" else self._tickets
        content = [(slot.name, slot.shape) for slot in slots]
        self.layout = checksum(f"{content} block_size={block_size}")
        self.composition = checksum(f"{content} block_size={block_size} world_size={world_size}")
        self.residuals: Residuals | None = None
        self.carries = self.withheld = False
        if error_feedback:
            own_values = self.own_range.stop - self.own_range.start if self.sharded else 0
            self.residuals = Residuals(
                torch.zeros(self.blocks * block_size, dtype=torch.float32, device=device),
                torch.zeros(own_values, dtype=torch.float32, device=device),
            )

    def message_bytes(self, blocks: int, bits: int) -> int:
        """Length of a message of so many of its blocks."""
        return message_bytes(blocks, bits, self.block_size)

    @property
    def own_range(self) -> slice:
        """The values of this rank's shard."""
        return slice(self.bounds[self.rank] * self.block_size, self.bounds[self.rank + 1] * self.block_size)

    def ticket(self, slot: Slot, in_use: bool) -> torch.Tensor:
        """What Horovod reduces in a gradient's place: (1,) float32, 1 if there is a gradient and 0 if there is none."""
        self._ticket_values[slot.index] = in_use
        return self._each_ticket[slot.index]

    def keep_residuals(self) -> None:
        """To be called when a quantization has written `residuals.own`."""
        if self.residuals is not None:
            self.carries = True

    def release_residuals(self) -> None:
        """Gathers all that is undelivered in `residuals.own`, from where `with_residual` hands it out."""
        self.withheld = False
        if self.residuals is not None and self.carries and self.sharded:
            # The shard's residual is part of the sum over ranks: delivered once, by its owner, it arrives once.
            self.residuals.own[self.own_range] += self.residuals.shard
            self.residuals.shard.zero_()

    def with_residual(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """A parameter's gradient plus its residual, in the gradient's dtype; the residual is then zero here.

        As where it is quantized, a gradient of zeros, or one that is not finite, takes nothing along.
        """
        if self.residuals is None or not self.carries:
            return gradient
        largest = float(gradient.abs().max())
        if not 0 < largest < float("inf"):
            self.withheld = True
            return gradient
        residual = self.residuals.own[slot.range].view(slot.shape)
        total = gradient + bounded(residual, gradient)
        residual.zero_()
        if gradient.dtype is torch.float16:
            limits = torch.finfo(torch.float16)
            total = total.clamp_(limits.min, limits.max)
        return total.to(gradient.dtype)

    def drop_residuals(self) -> None:
        """Owes nothing any more."""
        if self.residuals is not None:
            self.residuals.own.zero_()
            self.residuals.shard.zero_()
        self.carries = False


def make_buckets(
    parameters: list[tuple[str, torch.Tensor]],
    *,
    min_numel: int,
    bucket_bytes: int,
    skip: Skip | None = None,
    **common,
) -> tuple[list[Bucket], dict[str, Slot]]:
    """Fills buckets with parameters, last parameter first: backward produces gradients roughly in that order.

    Parameters of fewer than `min_numel` values, complex ones, and those that `skip` says, stay out. A bucket ends when
    another parameter would take it over `bucket_bytes` bytes of float32, or when the device changes; a parameter is
    never divided.

    Args:
        parameters: (unique name, parameter), in the same order on every rank.
        skip: says of a name and a parameter that it is to stay out.
        common: passed to every `Bucket`.

    Returns:
        The buckets, and the slots by name.
    """
    groups: list[tuple[torch.device, list[Slot]]] = []
    for name, parameter in reversed(parameters):
        numel = parameter.numel()
        if numel < min_numel or not parameter.is_floating_point() or (skip is not None and skip(name, parameter)):
            continue
        device, slots = groups[-1] if groups else (None, [])
        start = slots[-1].start + slots[-1].numel if slots else 0
        if device != parameter.device or (start + numel) * 4 > bucket_bytes:
            slots, start = [], 0
            groups.append((parameter.device, slots))
        slots.append(Slot(name, tuple(parameter.shape), len(groups) - 1, len(slots), start, numel))
    buckets = [Bucket(slots, device=device, **common) for device, slots in groups]
    return buckets, {slot.name: slot for bucket in buckets for slot in bucket.slots}
