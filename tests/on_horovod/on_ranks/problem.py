"""What the checks share: a problem whose gradients are known, the oracle, and a comparison of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable

import horovod.torch as hvd
import numpy as np
import torch
from torch import Tensor, nn

from hvd_dyncomp import Controller, DynamicQuantizer, Static

# Where what is trained lies: test_on_gpus.py runs some of the files there. All ranks may share one.
DEVICE = torch.device(os.environ.get("HVD_DYNCOMP_TEST_DEVICE", "cpu"))

Compress = Callable[[], object]  # makes what `hvd.DistributedOptimizer` takes as `compression`

# Relative error that a tensor's sum of updates may have after one or a few steps, from Gaussian gradients. One step is
# the worst: error feedback keeps the error of a sum from growing with it. In blocks of 64 values (of 512), at 1 bit a
# quantization leaves an error of 0.60; the sum of four ranks' signs, quantized again, one of 0.80 (0.72 with three). At
# 2 bits these are 0.54 (0.66) and 0.78 (0.98), at 3 bits 0.26 (0.32) and 0.38 (0.48). Nothing at all would be 1.
BOUNDS = {1: 0.9, 2: 0.9, 3: 0.5, 4: 0.25, 8: 0.02, 16: 1e-4, 32: 1e-5}
# Absolute error of what shares a block with larger values, as small tensors do.
SLACK = {8: 0.1, 16: 1e-3}
# How much of the expected sum must be in it: its projection. A code of least squared error that leaves an error of E
# delivers 1 - E^2, which is 0.36 with four ranks at 1 bit.
DELIVERED = 0.25


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


def attached(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Compressed from the first step on, if it is."""
    if isinstance(optimizer._compression, DynamicQuantizer):
        optimizer._compression.attach(optimizer)
    return optimizer


class Problem:
    """Parameters whose gradients are exactly what a check wants them to be: the loss is sum(parameter * wanted)."""

    SHAPES = {"conv": (16, 12, 3, 3), "odd": (1031,), "matrix": (129, 65), "bias": (10,), "scalar": (), "long": (5000,)}
    LARGE = {"large": (50_000,)}

    def __init__(
        self,
        *,
        dtype=torch.float32,
        names=None,
        prefix="",
        device: torch.device = DEVICE,
        attach: bool = True,
        **optimizer_arguments,
    ) -> None:
        shapes = {name: {**self.SHAPES, **self.LARGE}[name] for name in names or self.SHAPES}
        self.parameters = {
            name: torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device)) for name, shape in shapes.items()
        }
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters.values(), lr=1.0),
            named_parameters=[(prefix + name, p) for name, p in self.parameters.items()],
            **optimizer_arguments,
        )
        if attach:
            attached(self.optimizer)

    def draw(self, seed: int, precision: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Gaussian gradients, other ones on every rank, which a dtype of less precision can hold as well."""
        generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        return {
            name: torch.randn(p.shape, generator=generator).to(precision).to(p) for name, p in self.parameters.items()
        }

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


class Linear(nn.Module):
    """Parameters of several sizes; the loss is their product with a noise of each rank's own."""

    def __init__(self, sizes: tuple[int, ...] = (5000, 2048, 1031, 10)) -> None:
        super().__init__()
        self.values = nn.ParameterList([nn.Parameter(torch.zeros(size, device=DEVICE)) for size in sizes])

    def forward(self, seed: int, used: tuple[int, ...] | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
        noise = [torch.randn(value.shape, generator=generator).to(DEVICE) for value in self.values]
        wanted = range(len(noise)) if used is None else used
        return torch.stack([(self.values[i] * noise[i]).sum() for i in wanted]).sum()


def distribute(
    model: nn.Module, compress: Compress, lr: float = 1.0, prefix: str = "", **arguments
) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    named = [(prefix + name, parameter) for name, parameter in model.named_parameters()]
    return attached(hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compress(), **arguments))


def weights(*models: nn.Module) -> list[Tensor]:
    return [parameter.detach().clone() for model in models for parameter in model.parameters()]


def same_on_all_ranks(tensors, name: str) -> bool:
    """Whether the tensors hold the same bits on every rank."""
    flat = torch.cat([t.detach().to(torch.float64).flatten() for t in tensors])
    everyone = hvd.allgather(flat[None], name=name)
    # NaN differs from itself; bits do not.
    bits = everyone.view(torch.int64)
    return bool((bits == bits[0]).all())


def undelivered(quantizer: DynamicQuantizer, name: str, shape: torch.Size) -> Tensor:
    """Sum over ranks of what both residuals hold for a parameter; shards are put together from their owners."""
    state = quantizer.state_dict()
    total = float64_sum(state["residuals"][name].float().numpy(), f"residual.{name}")
    for bucket in quantizer._plan.buckets:
        for slot in bucket.slots:
            if slot.name == name and bucket.section.sharded:
                values = state["shard_residuals"][bucket.name]["values"].float()
                whole = hvd.allgather(values, name=f"shard.{name}")
                total += whole[slot.range].view(shape).double().numpy()
    return torch.from_numpy(total)


def ours(bits: float, **arguments) -> Compress:
    """Makes quantizers that share a controller."""
    controller = Controller(Static(bits))
    return lambda: DynamicQuantizer(controller, **arguments)


def assert_close(got: Tensor, expected: Tensor, bits: float, precision: float = 0.0) -> None:
    """Whether a tensor's sum of updates is the expected one, within what the level allows, or the dtype's precision."""
    assert got.shape == expected.shape
    got, expected = got.double(), expected.double()
    what = f"{bits} bits, shape {tuple(got.shape)}"
    slack = SLACK.get(bits, 1e-6)
    assert (got - expected).norm() <= max(BOUNDS[bits], precision) * expected.norm() + slack, what
    assert (got * expected).sum() >= DELIVERED * expected.square().sum() - slack * expected.norm(), what


def level_of(tensor: Tensor, bits: float) -> int:
    """At which level it travels: small tensors have 8 bits at least."""
    return bits if tensor.numel() >= 1024 else max(bits, 8)
