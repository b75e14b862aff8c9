"""The mean of several workers' gradients, as compression leaves it: uncompressed, and quantized with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hvd_dyncomp.allocation import allocate
from screening.contenders import Contender
from screening.feedback import Groups, Sender

SMALL = 1024  # tensors of fewer values are small: the library's min_numel

Gradients = Sequence[Sequence[Tensor]]  # per worker, of each tensor, flat


@dataclass
class Traffic:
    """What one worker sends, as docs/math.md counts it for two workers: each value once. (More send 2 (N-1)/N.)"""

    values: int = 0
    bytes: float = 0.0

    @property
    def bits(self) -> float:
        """Bits a value."""
        return 8 * self.bytes / self.values if self.values else 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.values + other.values, self.bytes + other.bytes)

    def count(self, values: int, sent: float) -> None:
        """One more message."""
        self.values += values
        self.bytes += sent


@dataclass
class Aggregator:
    """Averages gradients, uncompressed; what compresses has a mean of its own.

    Args:
        shapes: of each large tensor.
        workers: how many there are.
        seed: of whatever is random.
    """

    contender: Contender
    shapes: Sequence[torch.Size]
    workers: int
    seed: int = 0
    traffic: Traffic = field(default_factory=Traffic)

    def __post_init__(self) -> None:
        self.sizes = [shape.numel() for shape in self.shapes]
        self.values = sum(self.sizes)
        self.begin()

    def begin(self) -> None:
        """What a method keeps from step to step."""

    def new_epoch(self) -> None:
        """Called before each epoch."""

    def new_step(self, progress: float) -> None:
        """Called before each step: what part of the training is over."""
        self.levels = [self.contender.bits_at(progress)] * len(self.sizes)

    def mean(self, gradients: Gradients) -> list[Tensor]:
        """The mean of each tensor, flat, as it arrives. At 32 bits that is what there is."""
        plain = set(self.levels) == {32}
        means, sent = Aggregator.exchange(self, gradients) if plain else self.exchange(gradients)
        self.traffic.count(self.values, sent)
        return means

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        """Means, and the bytes that a worker sends."""
        return average(gradients), 4 * self.values

    def notes(self) -> dict:
        """What is worth writing down after an epoch."""
        return {}


class Quantized(Aggregator):
    """The library's exchange: one quantization of each worker's gradients, and, of more than two, one of the sum.

    Attributes:
        beside: values of small tensors, which share a budget.
    """

    def begin(self) -> None:
        feedback = self.contender.feedback
        self.senders = [Sender(self.sizes, feedback != "none") for _ in range(self.workers)]
        self.owner = Sender(self.sizes, feedback == "both") if self.workers > 2 else None
        self.energies: list[float] = []  # squared norms of a worker's gradients, of the last epoch
        self.gathered = torch.zeros(len(self.sizes))
        self.budget, self.beside = 0.0, 0

    def new_epoch(self) -> None:
        self.budget = 0  # not what any step has, so that the next one allocates
        self.energies = self.gathered.tolist() if self.gathered.any() else []
        self.gathered.zero_()

    def new_step(self, progress: float) -> None:
        budget = self.contender.bits_at(progress)
        if budget == self.budget:
            return
        self.budget, self.levels = budget, [budget] * len(self.sizes)
        if self.contender.by_tensor and self.energies:
            # The budget is for all, and small ones have their bits of it.
            left = budget * (self.values + self.beside) - self.contender.small_bits_at(progress) * self.beside
            self.levels = list(allocate(self.sizes, self.energies, left / self.values))
        self.groups: Groups = {}
        for tensor, bits in enumerate(self.levels):
            self.groups.setdefault(bits, []).append(tensor)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        if self.contender.by_tensor:
            self.gathered += torch.stack([g.square().sum() for g in gradients[0]])
        return relay(self.senders, self.owner, gradients, self.groups)

    def notes(self) -> dict:
        return {"levels": self.levels}


class Small:
    """The tensors that are too small to be worth a level of their own: as float32, rounded to float16, or quantized.

    Args:
        contender: whose they are.
        sizes: values of each.
        workers: how many there are.
    """

    def __init__(self, contender: Contender, sizes: Sequence[int], workers: int) -> None:
        self.values, self._all = sum(sizes), list(range(len(sizes)))
        self.senders = [Sender(sizes, contender.feedback != "none") for _ in range(workers)]
        self.owner = Sender(sizes, contender.feedback == "both") if workers > 2 else None
        self._half = contender.method == "fp16"
        self.traffic = Traffic()

    def mean(self, gradients: Gradients, bits: int) -> list[Tensor]:
        """Of each tensor, flat."""
        if not self.values:
            return []
        if bits == 32 or self._half:
            means, sent = (half if self._half else average)(gradients), self.values * bits / 8
        else:
            means, sent = relay(self.senders, self.owner, gradients, {bits: self._all})
        self.traffic.count(self.values, sent)
        return means


def relay(
    senders: Sequence[Sender], owner: Sender | None, gradients: Gradients, groups: Groups
) -> tuple[list[Tensor], float]:
    """From each sender, by way of the owner of the sum if there is one; the means, and the bytes of one sender."""
    sent = 0
    arrived = []
    for sender, own in zip(senders, gradients, strict=True):
        got, sent = sender.send(own, groups)
        arrived.append(got)
    sums = [torch.stack(versions).sum(0) for versions in zip(*arrived, strict=True)]
    if owner:
        sums, _ = owner.send(sums, groups)
    return [total / len(senders) for total in sums], sent


def average(gradients: Gradients) -> list[Tensor]:
    """The mean of each tensor."""
    return [torch.stack(list(own)).mean(0) for own in zip(*gradients, strict=True)]


def half(gradients: Gradients) -> list[Tensor]:
    """The same as Horovod's fp16 has it: rounded to float16, and so is every sum."""
    return [(sum(g.half() for g in own) / len(own)).float() for own in zip(*gradients, strict=True)]  # type: ignore[union-attr]
