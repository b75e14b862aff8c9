"""What others do: Horovod's fp16, one scale a tensor, natural compression; PowerSGD, top-k, masks, random-k, LoCo and
1-bit Adam, each with its own error feedback. Sums of several workers are not quantized again (but 1-bit Adam's, whose
authors do), to the comparators' advantage.
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
            owed = self.gather(worker, torch.cat(list(own)))
            places = self.places(owed, count)
            arrived.append(torch.zeros_like(owed).index_copy_(0, places, owed[places]))
            self.sent(worker, places)
        return list(torch.stack(arrived).mean(0).split(self.sizes)), count * self.each / 8

    def gather(self, worker: int, gradient: Tensor) -> Tensor:
        """What a worker owes with one more gradient."""
        self.owed[worker] += gradient
        return self.owed[worker]

    def places(self, owed: Tensor, count: int) -> Tensor:
        """Which values are sent."""
        return owed.abs().topk(count).indices

    def sent(self, worker: int, places: Tensor) -> None:
        """Nothing is owed there any more."""
        self.owed[worker][places] = 0


class MaskedTopK(TopK):
    """Lin et al., 2018: each worker gathers its own momentum, and forgets it where it has been sent. (Without their
    clipping, and without a ramp of ever fewer values.)
    """

    MOMENTUM = 0.9  # that of all tasks with SGD

    def begin(self) -> None:
        super().begin()
        self.velocity = [torch.zeros(self.values) for _ in range(self.workers)]

    def gather(self, worker: int, gradient: Tensor) -> Tensor:
        return super().gather(worker, self.velocity[worker].mul_(self.MOMENTUM).add_(gradient))

    def sent(self, worker: int, places: Tensor) -> None:
        super().sent(worker, places)
        self.velocity[worker][places] = 0


class RandomK(TopK):
    """Values at places that all workers draw alike, so that no index is sent."""

    def begin(self) -> None:
        super().begin()
        self.each = VALUE_BITS
        self.generator = torch.Generator().manual_seed(self.seed)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        self.order = torch.randperm(self.values, generator=self.generator)
        return super().exchange(gradients)

    def places(self, owed: Tensor, count: int) -> Tensor:
        return self.order[:count]


class Natural(Aggregator):
    """Horváth et al., 2019: rounded to one of the two nearest powers of two, by chance and right in the mean. A sign
    and an exponent are 9 bits; nothing is carried on.
    """

    def begin(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        rounded = [[self.rounded(gradient) for gradient in own] for own in gradients]
        return average(rounded), 9 * self.values / 8

    def rounded(self, values: Tensor) -> Tensor:
        """To powers of two."""
        mantissa, exponent = torch.frexp(values)  # mantissa of 1/2 to 1: the chance of the upper one is 2 |m| - 1
        up = torch.rand(values.shape, generator=self.generator) < 2 * mantissa.abs() - 1
        return torch.ldexp(values.sign(), exponent - 1 + up.int())


class LoCo(Aggregator):
    """Xie et al., 2024: what is lost is kept in 8 bits, as a moving average, and forgotten now and then."""

    # Our choice: the paper leaves them to the user, and few of these trainings are as long as to forget twice.
    KEPT, STEPS = 0.8, 1024

    def begin(self) -> None:
        self.owed = [torch.zeros(self.values) for _ in range(self.workers)]
        self.step = 0

    def exchange(self, gradients: Gradients) -> tuple[list[Tensor], float]:
        bits, arrived = self.bits, []
        self.step += 1
        for worker, own in enumerate(gradients):
            wanted = torch.cat(list(own)) + self.owed[worker]
            arrived.append(codec.decoded(wanted, bits))
            error = (1 - self.KEPT) * self.owed[worker] + self.KEPT * (wanted - arrived[-1])
            self.owed[worker] = codec.decoded(error, 8) if self.step % self.STEPS else torch.zeros_like(error)
        return list(torch.stack(arrived).mean(0).split(self.sizes)), codec.message_bytes(self.values, bits)


class OneBitAdam(Quantized):
    """Tang et al., 2021: uncompressed at first; then momentum travels at 1 bit, and the optimizer's variances stay what
    they are. What is the mean here is Adam's momentum then: the trainer steps by it (`trainer.step_frozen`).
    """

    BETA = 0.9

    def begin(self) -> None:
        super().begin()
        self.momentum = [torch.zeros(size) for size in self.sizes]

    def mean(self, gradients: Gradients) -> list[Tensor]:
        with_momentum = [
            [self.BETA * m + (1 - self.BETA) * g for m, g in zip(self.momentum, own, strict=True)] for own in gradients
        ]
        compressed = self.bits != 32
        means = super().mean(with_momentum if compressed else gradients)
        self.momentum = list(means) if compressed else average(with_momentum)
        return means


_BY_KIND = {
    "uncompressed": Aggregator,
    "fp16": Float16,
    "quantized": Quantized,
    "scale per tensor": ScalePerTensor,
    "powersgd": PowerSGD,
    "top-k": TopK,
    "masked top-k": MaskedTopK,
    "random-k": RandomK,
    "natural": Natural,
    "loco": LoCo,
    "1-bit adam": OneBitAdam,
}


def aggregator(method: Method, shapes: Sequence[torch.Size], workers: int, seed: int) -> Aggregator:
    """What averages gradients the method's way."""
    return _BY_KIND[method.kind](method, shapes, workers, seed)
