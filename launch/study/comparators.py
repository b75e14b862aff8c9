"""What others do: Horovod's fp16, one scale a tensor; QSGD; PowerSGD and top-k, each with its own error feedback. Sums
of several workers are not quantized again, to the comparators' advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from study import codec
from study.aggregation import Aggregator, Gradients, Quantized, average, half
from study.methods import Method

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
        bits = int(self.bits)
        rounded = [[_rounded(gradient, 2 ** (bits - 1) - 1) for gradient in own] for own in gradients]
        return average(rounded), self.values * bits / 8 + 4 * len(self.sizes)


def _rounded(values: Tensor, most: int) -> Tensor:
    scale = values.abs().max() / most
    return (values / scale).round() * scale if scale > 0 else values


class QSGD(Aggregator):
    """Alistarh et al., 2017, with the maximum as the norm, as their implementation has it: linear codes of one scale
    for each 512 values, rounded up or down at random, right on average; what is lost is lost.

    Sums are not quantized once more, however many workers there are.
    """

    def begin(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        rounded = [[self.rounded(gradient) for gradient in own] for own in gradients]
        scales = sum(-(-size // codec.BLOCK_SIZE) for size in self.sizes)
        return average(rounded), self.values * self.bits / 8 + 4 * scales

    def rounded(self, values: Tensor) -> Tensor:
        """What arrives of float32 (values,): codes -K to K of `bits` bits, K = 2^(bits - 1) - 1."""
        blocks = torch.nn.functional.pad(values, (0, -len(values) % codec.BLOCK_SIZE)).view(-1, codec.BLOCK_SIZE)
        scale = blocks.abs().amax(dim=1, keepdim=True) / (2 ** (int(self.bits) - 1) - 1)
        codes = blocks / torch.where(scale > 0, scale, 1.0) + torch.rand(blocks.shape, generator=self.random)
        return (codes.floor() * scale).view(-1)[: len(values)]


class PowerSGD(Aggregator):
    """Vogels et al., 2019, by the parts of torch's communication hook: its seeds, its orthogonalization, Q kept from
    step to step. The hook itself wants a process group, and here one process is all workers.
    """

    def begin(self) -> None:
        state = powerSGD_hook.PowerSGDState(None, self.method.rank, random_seed=self.seed)
        self.owed = [[torch.zeros(size) for size in self.sizes] for _ in range(self.workers)]
        columns = [shape.numel() // shape[0] for shape in self.shapes]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(state.rng.randint(1_000_000_000))
            ranks = [min(state.matrix_approximation_rank, s[0], n) for s, n in zip(self.shapes, columns, strict=True)]
            self.q = [torch.randn(n, rank) for n, rank in zip(columns, ranks, strict=True)]

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        means, numbers = [], 0
        for i, q in enumerate(self.q):
            matrices = [(own[i] + owed[i]).view(-1, len(q)) for own, owed in zip(gradients, self.owed, strict=True)]
            powerSGD_hook._orthogonalize(q[None])
            p = torch.stack([matrix @ q for matrix in matrices]).mean(0)
            powerSGD_hook._orthogonalize(p[None])
            self.q[i] = torch.stack([matrix.T @ p for matrix in matrices]).mean(0)
            mean = p @ self.q[i].T
            for owed, matrix in zip(self.owed, matrices, strict=True):
                owed[i] = (matrix - mean).flatten()
            means.append(mean.flatten())
            numbers += p.numel() + q.numel()
        return means, 4 * numbers


class TopK(Aggregator):
    """The largest values of all tensors; of each, 16 bits and its index in as many bits as their number needs."""

    def begin(self) -> None:
        self.owed = [torch.zeros(self.values) for _ in range(self.workers)]
        self.each = VALUE_BITS + math.ceil(math.log2(self.values))

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        count = max(1, round(self.values * self.bits / self.each))
        arrived = []
        for worker, own in enumerate(gradients):
            owed = self.owed[worker].add_(torch.cat(list(own)))
            places = owed.abs().topk(count).indices
            arrived.append(torch.zeros_like(owed).index_copy_(0, places, owed[places]))
            owed[places] = 0
        return list(torch.stack(arrived).mean(0).split(self.sizes)), count * self.each / 8


BY_KIND = {
    "uncompressed": Aggregator,
    "fp16": Float16,
    "quantized": Quantized,
    "scale per tensor": ScalePerTensor,
    "qsgd": QSGD,
    "powersgd": PowerSGD,
    "top-k": TopK,
}


def aggregator(method: Method, shapes: Sequence[torch.Size], workers: int, seed: int) -> Aggregator:
    """What averages gradients the method's way."""
    return BY_KIND[method.kind](method, shapes, workers, seed)
