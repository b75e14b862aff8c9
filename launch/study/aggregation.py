"""The mean of several workers' gradients, as compression leaves it: uncompressed, and quantized with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from study.methods import Method
from study.workers import Workers, message_bytes

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

    method: Method
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

    def new_step(self, progress: float) -> None:
        """Called before each step: what part of the training is over."""
        self.bits = self.method.bits_at(progress)

    def mean(self, gradients: Gradients) -> list[Tensor]:
        """The mean of each tensor, flat, as it arrives. At 32 bits that is what there is."""
        means, sent = Aggregator.exchange(self, gradients) if self.bits == 32 else self.exchange(gradients)
        self.traffic.count(self.values, sent)
        return means

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        """Means, and the bytes that a worker sends."""
        return average(gradients), 4 * self.values


class Quantized(Aggregator):
    """The library's exchange: one quantization of each worker's gradients, and, of more than two, one of the sum."""

    def begin(self) -> None:
        self.simulated = Workers(self.workers, self.values)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        return exchanged(self.simulated, gradients, self.bits)


class Small:
    """The tensors that are too small to be worth a level of their own: as float32, rounded to float16, or quantized.

    Args:
        method: whose they are.
        sizes: values of each.
        workers: how many there are.
    """

    def __init__(self, method: Method, sizes: Sequence[int], workers: int) -> None:
        self.values = sum(sizes)
        self._exchange = Workers(workers, self.values) if self.values else None
        self._half = method.kind == "fp16"
        self.traffic = Traffic()

    def mean(self, gradients: Gradients, bits: int) -> list[Tensor]:
        """Of each tensor, flat."""
        if self._exchange is None:
            return []
        if bits == 32 or self._half:
            means, sent = (half if self._half else average)(gradients), self.values * bits / 8
        else:
            means, sent = exchanged(self._exchange, gradients, bits)
        self.traffic.count(self.values, sent)
        return means


def exchanged(workers: Workers, gradients: Gradients, bits: float) -> tuple[list[Tensor], float]:
    """The means of tensors that travel as one run of blocks, and the bytes of a message, its header included."""
    mean = workers.mean([torch.cat(list(own)) for own in gradients], bits)
    return list(mean.split([tensor.numel() for tensor in gradients[0]])), message_bytes(mean.numel(), bits)


def average(gradients: Gradients) -> list[Tensor]:
    """The mean of each tensor."""
    return [torch.stack(list(own)).mean(0) for own in zip(*gradients, strict=True)]


def half(gradients: Gradients) -> list[Tensor]:
    """The same as Horovod's fp16 has it: rounded to float16, and so is every sum."""
    return [(sum(g.half() for g in own) / len(own)).float() for own in zip(*gradients, strict=True)]  # type: ignore[union-attr]
