"""What the checks share: a model that FSDP2 shards, a whole copy of it on the CPU, and comparisons.

HVD_DYNCOMP_TEST_DEVICE says where the sharded one lives.
"""

from __future__ import annotations

import copy
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from hvd_dyncomp import fsdp

# Of a tensor's mean after a step (tests/on_horovod/on_ranks/problem.py says why).
BOUNDS = {2: 0.9, 4: 0.3, 8: 0.02, 16: 1e-3, 32: 1e-6}


DEVICE = os.environ.get("HVD_DYNCOMP_TEST_DEVICE", "cpu")


class Blocks(nn.Module):
    """A small model with odd sizes: shards are uneven, and padded."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(31, 65)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(65, 129), nn.Tanh(), nn.Linear(129, 65)) for _ in range(3))
        self.last = nn.Linear(65, 3)

    def forward(self, inputs: Tensor, order: Iterable[int] = range(3)) -> Tensor:
        hidden = self.first(inputs)
        for i in order:
            hidden = hidden + self.blocks[i](hidden)
        return self.last(hidden)


class Checkpointed(Blocks):
    def forward(self, inputs: Tensor, order: Iterable[int] = range(3)) -> Tensor:
        hidden = self.first(inputs)
        for i in order:
            hidden = hidden + checkpoint(self.blocks[i], hidden, use_reentrant=False)
        return self.last(hidden)


class WithUnused(Blocks):
    """With parameters that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(5, 5)


@functools.cache  # its groups have threads of their own
def mesh(*, backend: str | None = "hvd_dyncomp") -> DeviceMesh:
    """Two shards in each replica where there are four ranks, or else one. `backend`: of replicas; None: torch's."""
    fsdp.register_backend(4)
    size = dist.get_world_size()
    shards = 2 if size == 4 else 1
    override = {"replicate": backend} if backend else None
    names = ("replicate", "shard")
    return init_device_mesh(DEVICE, (size // shards, shards), mesh_dim_names=names, backend_override=override)


def sharded(whole: nn.Module, *, nested: bool = False, **arguments: Any) -> Any:
    """A sharded copy of a model. `nested`: each block's first layer is a unit, too. Arguments: of `fully_shard`."""
    model = copy.deepcopy(whole)
    if DEVICE != "cpu":  # models on "meta" cannot be moved
        model = model.to(DEVICE)
    arguments = {"mesh": mesh(), **arguments}
    for block in model.blocks:
        for module in [block[0], block] if nested else [block]:
            fully_shard(module, **arguments)
    return fully_shard(model, **arguments)


def compressed(bits: Any = 4, *, whole: nn.Module | None = None, sharding: Any = None, **arguments: Any):
    """A whole model, its sharded copy, and that one's quantizer."""
    if whole is None:
        torch.manual_seed(0)
        whole = Blocks()
    model = sharded(whole, **(sharding or {}))
    arguments = {"block_size": 64, "bucket_bytes": 40_000, "min_numel": 300, **arguments}
    return whole, model, fsdp.attach(model, bits, **arguments)


def loss_of(model: nn.Module, seed: int, rank: int, **arguments: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    inputs, weights = torch.randn(16, 31, generator=generator), torch.randn(16, 3, generator=generator)
    first = next(model.parameters())
    return (model(inputs.to(first.device, first.dtype), **arguments) * weights.to(first.device)).sum()


def means(whole: nn.Module, seed: int, loss: Callable = loss_of) -> dict[str, Tensor]:
    """Of all ranks' gradients, by parameter's name; without a gradient on any rank, none."""
    size = dist.get_world_size()
    whole.zero_grad()
    (sum(loss(whole, seed, rank) for rank in range(size)) / size).backward()
    return {name: each.grad.clone() for name, each in whole.named_parameters() if each.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """This rank's shards."""
    return {name: each.grad.to_local() for name, each in model.named_parameters() if each.grad is not None}


def same_on_replicas(tensors: dict[str, Tensor]) -> bool:
    """Whether all ranks with this one's shards have the same bits."""
    group = mesh()["replicate"].get_group()
    flat = torch.cat([tensor.detach().double().flatten().cpu() for tensor in tensors.values()])
    everyone = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, flat, group=group)
    return all(torch.equal(other.view(torch.int64), flat.view(torch.int64)) for other in everyone)


def assert_means(model: nn.Module, expected: dict[str, Tensor], bits: float) -> None:
    """Gradients are means, to the level, and the same on all replicas."""
    assert same_on_replicas(gradients(model))
    found = {name: each.grad.full_tensor().cpu() for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == expected.keys()
    for name, mean in expected.items():
        error, norm = (found[name] - mean).norm(), mean.norm()
        # Small tensors have at least 8 bits, and may share a block with larger ones.
        assert error <= BOUNDS[bits] * norm + (1e-2 * norm if bits < 16 else 1e-6), f"{name}: {error} of {norm}"


def assert_close(model: nn.Module, reference: nn.Module, bits: float) -> None:
    """Gradients are those of another sharded model, to the level, and the same on all replicas."""
    whole = {
        name: each.grad.full_tensor().cpu() for name, each in reference.named_parameters() if each.grad is not None
    }
    assert_means(model, whole, bits)


def a_step(model: nn.Module, seed: int, loss: Callable = loss_of) -> dict[str, Tensor]:
    model.zero_grad()
    loss(model, seed, dist.get_rank()).backward()
    return gradients(model)
