"""What the checks share: models whose gradients are known, and comparisons among ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import ddp

# Of a tensor's mean after a step, from Gaussian gradients (tests/on_horovod/on_ranks/problem.py says why).
BOUNDS = {1: 0.9, 2: 0.9, 4: 0.25, 8: 0.02, 16: 1e-4, 32: 1e-5}


class Linear(nn.Module):
    """Parameters of several sizes; the loss is their product with a noise of each rank's own, which is the gradient."""

    SIZES = (5000, 2048, 1031, 10)

    def __init__(self, sizes: tuple[int, ...] = SIZES, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes])

    def forward(self, seed: int, used: tuple[int, ...] | None = None) -> Tensor:
        noise = self.noise(seed, dist.get_rank())
        wanted = range(len(noise)) if used is None else used
        return torch.stack([(self.values[i] * noise[i]).sum().real.float() for i in wanted]).sum()

    def noise(self, seed: int, rank: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        kinds = [torch.complex64 if value.is_complex() else torch.float32 for value in self.values]
        return [
            torch.randn(value.shape, dtype=kind, generator=generator).to(value)
            for value, kind in zip(self.values, kinds, strict=True)
        ]

    def mean(self, seed: int) -> list[Tensor]:
        """Of all ranks' gradients."""
        size = dist.get_world_size()
        everyone = [self.noise(seed, rank) for rank in range(size)]
        return [sum(each[i].double() for each in everyone) / size for i in range(len(self.values))]


def distributed(bits: float = 4, *, module: nn.Module | None = None, ddp_arguments=None, **arguments):
    """A model and its quantizer."""
    model = DistributedDataParallel(module or Linear(), **{"bucket_cap_mb": 0.01, **(ddp_arguments or {})})
    return model, ddp.compress(model, bits, **{"block_size": 64, "bucket_bytes": 20_000, **arguments})


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.detach().clone() for parameter in model.parameters()]


def same_on_all_ranks(tensors: list[Tensor]) -> bool:
    """Whether they hold the same bits."""
    flat = torch.cat([tensor.detach().double().flatten() for tensor in tensors])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, flat)
    return all(torch.equal(other.view(torch.int64), flat.view(torch.int64)) for other in everyone)


def assert_means(got: list[Tensor], expected: list[Tensor], bits: float) -> None:
    for one, mean in zip(got, expected, strict=True):
        level = bits if mean.numel() >= 1024 else max(bits, 8)
        error, norm = (one.double() - mean).norm(), mean.norm()
        assert error <= BOUNDS[level] * norm + 0.1 * (mean.numel() < 1024) + 1e-6, f"{mean.numel()}: {error} of {norm}"
