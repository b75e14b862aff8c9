"""What others do: PowerSGD, top-k, random-k, natural compression; all but the last with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from screening.aggregation import Aggregator, Gradients, Quantized
from screening.contenders import Contender

VALUE_BITS = 16  # of a value that is sent as it is: bfloat16, to the comparators' advantage


class PowerSGD(Aggregator):
    """Vogels et al., 2019, as PyTorch's communication hook has it: one power iteration a step, warm started."""

    def begin(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        self.rows = [shape[0] for shape in self.shapes]
        self.owed = [[torch.zeros(size) for size in self.sizes] for _ in range(self.workers)]
        self.q = [
            torch.randn(size // rows, min(self.contender.rank, rows, size // rows), generator=generator)
            for size, rows in zip(self.sizes, self.rows, strict=True)
        ]

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        means, numbers = [], 0
        for i, rows in enumerate(self.rows):
            matrices = [(own[i] + owed[i]).view(rows, -1) for own, owed in zip(gradients, self.owed, strict=True)]
            p = torch.stack([matrix @ self.q[i] for matrix in matrices]).mean(0)
            p, _ = torch.linalg.qr(p)
            q = torch.stack([matrix.T @ p for matrix in matrices]).mean(0)
            self.q[i] = q
            mean = p @ q.T
            for owed, matrix in zip(self.owed, matrices, strict=True):
                owed[i] = (matrix - mean).flatten()
            means.append(mean.flatten())
            numbers += p.numel() + q.numel()
        return means, 4 * numbers


class _OfTheWhole(Aggregator):
    """Those that look at all tensors as one vector."""

    def begin(self) -> None:
        self.owed = [torch.zeros(self.values) for _ in range(self.workers)]
        self.generator = torch.Generator().manual_seed(self.seed)
        self.bits = self.contender.bits_at(0)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        wholes = [torch.cat(list(own)) + owed for own, owed in zip(gradients, self.owed, strict=True)]
        arrived, sent = self.send(wholes)
        for owed, whole, part in zip(self.owed, wholes, arrived, strict=True):
            torch.sub(whole, part, out=owed)
        return list(torch.stack(arrived).mean(0).split(self.sizes)), sent

    def send(self, wholes: list[Tensor]) -> tuple[list[Tensor], float]:
        """What arrives of each worker's vector, and the bytes of one."""
        raise NotImplementedError


class TopK(_OfTheWhole):
    """The largest values; of each, 16 bits and its index in as many bits as the vector's length needs."""

    def send(self, wholes: list[Tensor]) -> tuple[list[Tensor], float]:
        each = VALUE_BITS + math.ceil(math.log2(self.values))
        count = max(1, round(self.values * self.bits / each))
        return [_only(whole, whole.abs().topk(count).indices) for whole in wholes], count * each / 8


class RandomK(_OfTheWhole):
    """Values at places that all workers draw alike, so that no index travels."""

    def send(self, wholes: list[Tensor]) -> tuple[list[Tensor], float]:
        count = max(1, round(self.values * self.bits / VALUE_BITS))
        places = torch.randperm(self.values, generator=self.generator)[:count]
        return [_only(whole, places) for whole in wholes], count * VALUE_BITS / 8


class Natural(_OfTheWhole):
    """Horvath et al., 2019: sign and exponent, rounded at random to one of the two nearest powers of two; unbiased."""

    def send(self, wholes: list[Tensor]) -> tuple[list[Tensor], float]:
        arrived = []
        for whole, owed in zip(wholes, self.owed, strict=True):
            whole -= owed  # no feedback
            mantissa, exponent = torch.frexp(whole)  # of 1/2 to 1
            up = torch.rand(self.values, generator=self.generator) < 2 * mantissa.abs() - 1
            arrived.append(torch.ldexp(mantissa.sign(), exponent - 1 + up.int()))
        return arrived, self.values * 9 / 8


def _only(whole: Tensor, places: Tensor) -> Tensor:
    return torch.zeros_like(whole).index_copy_(0, places, whole[places])


_BY_METHOD = {
    "uncompressed": Aggregator,
    "quantized": Quantized,
    "powersgd": PowerSGD,
    "top-k": TopK,
    "random-k": RandomK,
    "natural": Natural,
}


def aggregator(contender: Contender, shapes: Sequence[torch.Size], workers: int, seed: int) -> Aggregator:
    """What averages gradients the contender's way."""
    return _BY_METHOD[contender.method](contender, shapes, workers, seed)
