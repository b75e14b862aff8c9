"""What others do: Horovod's fp16, one scale a tensor, and PowerSGD and top-k with error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from screening.aggregation import Aggregator, Gradients, Quantized, average, half
from screening.contenders import Contender

VALUE_BITS = 16  # of a value that is sent as it is: bfloat16, to the comparators' advantage


class Float16(Aggregator):
    """`horovod.torch.Compression.fp16`."""

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        return half(gradients), 2 * self.values


class ScalePerTensor(Aggregator):
    """Linear codes, k = round(x / s), of one scale a tensor, s = max |x| / (2^(b-1) - 1); what is lost is lost.

    Sums are not quantized once more, however many workers there are, and small tensors travel as float32.
    """

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        bits = int(self.levels[0])
        rounded = [[_rounded(gradient, 2 ** (bits - 1) - 1) for gradient in own] for own in gradients]
        return average(rounded), self.values * bits / 8 + 4 * len(self.sizes)


def _rounded(values: Tensor, most: int) -> Tensor:
    scale = values.abs().max() / most
    return (values / scale).round() * scale if scale > 0 else values


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


class TopK(Aggregator):
    """The largest values of all tensors; of each, 16 bits and its index in as many bits as their number needs."""

    def begin(self) -> None:
        self.owed = [torch.zeros(self.values) for _ in range(self.workers)]

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        each = VALUE_BITS + math.ceil(math.log2(self.values))
        count = max(1, round(self.values * self.levels[0] / each))
        arrived = []
        for own, owed in zip(gradients, self.owed, strict=True):
            owed += torch.cat(list(own))
            places = owed.abs().topk(count).indices
            arrived.append(torch.zeros_like(owed).index_copy_(0, places, owed[places]))
            owed[places] = 0
        return list(torch.stack(arrived).mean(0).split(self.sizes)), count * each / 8


_BY_METHOD = {
    "uncompressed": Aggregator,
    "fp16": Float16,
    "quantized": Quantized,
    "scale per tensor": ScalePerTensor,
    "powersgd": PowerSGD,
    "top-k": TopK,
}


def aggregator(contender: Contender, shapes: Sequence[torch.Size], workers: int, seed: int) -> Aggregator:
    """What averages gradients the contender's way."""
    return _BY_METHOD[contender.method](contender, shapes, workers, seed)
