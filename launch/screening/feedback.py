"""One sender with error feedback: what it owes, and what of it goes out in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hvd_dyncomp.kernels.reference import residual_bound
from screening import codec
from screening.codec import BLOCK_SIZE


@dataclass(frozen=True)
class Way:
    """How the values of some tensors travel.

    Attributes:
        bits: level of a block that is sent.
        period: a block is sent in every `period`-th step, in turns; in between it adds to what is owed.
        bound: what is owed may add so many times the norm of a block's gradient (equation 1a of docs/math.md).
        track: what is sent is not what is new, but how it differs from what the receiver has, which keeps it
            (Fatkhullin et al., 2023). A residual is then what the receiver has.
    """

    bits: float
    period: int = 1
    bound: float = 2.0
    track: bool = False

    @property
    def mean_bits(self) -> float:
        """Bits a value and step, without scales."""
        return self.bits / self.period


class Sender:
    """A worker, or the owner of a sum, with a residual for each of its tensors.

    Args:
        sizes: values of each tensor.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = list(sizes)
        self.residuals = [torch.zeros(size) for size in sizes]

    def send(self, tensors: Sequence[Tensor], groups: dict[Way, list[int]], step: int) -> tuple[list[Tensor], int]:
        """What arrives of one step's tensors, and the bytes it took. What does not arrive is owed.

        Args:
            tensors: float32, one of each size, flat.
            groups: which tensors travel which way; those of one are sent as one run of blocks.
            step: its number; decides whose turn it is where blocks take turns.
        """
        arrived: list[Tensor] = [torch.empty(0)] * len(tensors)
        total = 0
        for way, members in groups.items():
            sizes = [self.sizes[i] for i in members]
            gradient = torch.cat([tensors[i] for i in members])
            residual = torch.cat([self.residuals[i] for i in members])
            got, owed, sent = feed(gradient, residual, way, step)
            total += sent
            for i, part, left in zip(members, got.split(sizes), owed.split(sizes), strict=True):
                arrived[i], self.residuals[i] = part, left
        return arrived, total


def feed(gradient: Tensor, residual: Tensor, way: Way, step: int) -> tuple[Tensor, Tensor, int]:
    """Equations 1 and 1a for one run of blocks: what arrives, what is owed afterwards (both (n,)), and bytes."""
    blocks = -(-gradient.numel() // BLOCK_SIZE)
    if way.track:
        known = residual + codec.decoded(gradient - residual, way.bits)
        return known, known.clone(), blocks * codec.block_bytes(way.bits)
    if way.period == 1 and way.bound == residual_bound(way.bits):
        return *codec.fed_back(gradient, residual, way.bits), blocks * codec.block_bytes(way.bits)
    x, waits = bounded_sum(gradient, residual, way.bound)
    if way.period == 1:
        arrived = codec.decoded(x, way.bits)
        sent = blocks
    else:
        turn = (torch.arange(blocks) + step) % way.period == 0
        chosen = turn.repeat_interleave(BLOCK_SIZE)[: x.numel()]
        arrived = torch.zeros_like(x)
        sent = int(turn.sum())
        if sent:
            arrived[chosen] = codec.decoded(x[chosen], way.bits)
    owed = x - arrived
    if waits.any():  # a block whose gradient is zero throughout is sent as zeros and owes what it owed
        rows = waits.repeat_interleave(BLOCK_SIZE)[: x.numel()]
        arrived, owed = torch.where(rows, 0.0, arrived), torch.where(rows, residual, owed)
    return arrived, owed, sent * codec.block_bytes(way.bits)


def bounded_sum(gradient: Tensor, residual: Tensor, bound: float) -> tuple[Tensor, Tensor]:
    """Gradient + bounded residual, (n,), and which blocks have no gradient at all, (blocks,) bool."""
    rest = -gradient.numel() % BLOCK_SIZE
    g, e = (F.pad(values, (0, rest)).view(-1, BLOCK_SIZE) for values in (gradient, residual))
    squares, owed = g.square().sum(1, keepdim=True), e.square().sum(1, keepdim=True)
    factor = torch.where(owed > bound**2 * squares, bound * (squares / owed).sqrt(), 1.0)
    return (g + e * factor).view(-1)[: gradient.numel()], squares[:, 0] == 0
