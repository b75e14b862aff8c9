"""What the checks share: a problem whose gradients are known, the oracle, and a comparison of all ranks."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch


def float64_sum(array: np.ndarray, name: str) -> np.ndarray:
    """The oracle: the sum over ranks in float64, by mpi4py; by Horovod's allgather where there is no MPI (Gloo)."""
    array = np.ascontiguousarray(array, dtype=np.float64)
    if hvd.mpi_enabled():
        from mpi4py import MPI

        total = np.empty_like(array)
        MPI.COMM_WORLD.Allreduce(array, total, op=MPI.SUM)
        return total
    gathered = hvd.allgather(torch.from_numpy(array)[None], name=name)
    return gathered.numpy().sum(axis=0)


class Problem:
    """Parameters whose gradients are exactly what a check wants them to be: the loss is sum(parameter * wanted)."""

    SHAPES = {"conv": (16, 12, 3, 3), "odd": (1031,), "matrix": (129, 65), "bias": (10,), "scalar": (), "long": (5000,)}
    LARGE = {"large": (50_000,)}

    def __init__(self, *, dtype=torch.float32, names=None, prefix="", **optimizer_arguments) -> None:
        names = list(names or self.SHAPES)
        self.parameters = {
            name: torch.nn.Parameter(torch.zeros({**self.SHAPES, **self.LARGE}[name], dtype=dtype)) for name in names
        }
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=1.0),
            named_parameters=[(prefix + name, p) for name, p in self.parameters.items()],
            **optimizer_arguments,
        )

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        """Gaussian gradients, other ones on every rank."""
        generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        return {name: torch.randn(p.shape, generator=generator).to(p.dtype) for name, p in self.parameters.items()}

    def reduce(self, wanted: dict[str, torch.Tensor], order=None) -> dict[str, torch.Tensor]:
        """One backward pass and exchange; returns the reduced gradients. Who is not in `order` is unused."""
        self.optimizer.zero_grad()
        terms = [(self.parameters[name] * wanted[name]).sum() for name in (order or wanted)]
        if terms:
            torch.stack([term.float() for term in terms]).sum().backward()
        self.optimizer.synchronize()
        return {name: p.grad.detach().clone() for name, p in self.parameters.items()}

    def step(self) -> None:
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def same_on_all_ranks(tensors, name: str) -> bool:
    """Whether the tensors hold the same bits on every rank."""
    flat = torch.cat([t.detach().to(torch.float64).flatten() for t in tensors])
    everyone = hvd.allgather(flat[None], name=name)
    # NaN differs from itself; bits do not.
    bits = everyone.view(torch.int64)
    return bool((bits == bits[0]).all())
