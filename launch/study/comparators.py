"""What others do: Horovod's fp16; PowerSGD and top-k, each with its own error feedback. Sums of several workers are not
compressed again, to the comparators' advantage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from study.aggregation import Aggregator, Gradients, Quantized, half
from study.methods import Method

VALUE_BITS = 16  # of a value that is sent as it is: bfloat16, to the comparators' advantage


class Float16(Aggregator):
    """`horovod.torch.Compression.fp16`."""

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        return half(gradients), 2 * self.values


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
    "powersgd": PowerSGD,
    "top-k": TopK,
}


def aggregator(method: Method, shapes: Sequence[torch.Size], workers: int, seed: int) -> Aggregator:
    """What averages gradients the method's way."""
    return BY_KIND[method.kind](method, shapes, workers, seed)
