"""The exchange between replicas of a model that FSDP2 shards, in place of its own all-reduce.

mesh = init_device_mesh("cuda", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
quantizer = hvd_dyncomp.fsdp.compress(model, 4)
"""

from __future__ import annotations

from typing import Any, Unpack

import torch

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.fsdp.quantizer import Quantizer
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.options import Options

__all__ = ["Quantizer", "compress"]


def compress(
    model: torch.nn.Module,
    controller: Controller | Policy | float | None = None,
    *,
    replicas: Any = None,
    **options: Unpack[Options],
) -> Quantizer:
    """Average the gradients of a sharded model over its replicas, compressed. Call it on every rank of the job.

    FSDP reduces gradients within each replica, as always. Each rank's shard of the result is then averaged over the
    ranks that have the same shard. Numbers of values and bytes, as in `min_numel` and `bucket_bytes`, are those of this
    rank's shards.

    Args:
        model: torch's `fully_shard` was applied to the model and to its submodules, with one mesh: either of replicas
            and shards (HSDP), or of the shards of one replica only. Either dimension may have size 1. The model must
            not be compressed already.
        controller: gives the number of bits; default: a constant level of 4 bits. For a policy or a level, `compress`
            creates a controller over all ranks of the job.
        replicas: connects the ranks that have the same shard: a `DeviceMesh` of one dimension or a process group. Only
            needed if the model's mesh has shards only.
        options: see `hvd_dyncomp.sessions.options.Options`.

    Returns:
        A `Quantizer`. Its `controller` has the level, its `meter` counts what this rank sends to other replicas, and
        its `state_dict`, of which each rank of the job has its own, belongs in checkpoints.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the model cannot be compressed.
        LockstepError: another rank has raised such an error, or replicas differ. On all ranks that have no error of
            their own.
        TimeoutError, ConnectionError: another rank does not call it in time, or has ended.
        RuntimeError: the FSDP2 of this version of torch lacks something that hvd_dyncomp needs.

    Examples:
        One rank of one, which sends nothing. With `torchrun`, call `init_process_group("gloo")` or
        `init_process_group("nccl")`, and give the mesh the numbers of replicas and of shards.

        >>> import torch, torch.distributed as dist, hvd_dyncomp
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        >>> model = fully_shard(torch.nn.Linear(40, 30), mesh=mesh)
        >>> quantizer = hvd_dyncomp.fsdp.compress(model, 4, warmup_steps=100, warmup_bits=8)
        >>> model(torch.ones(3, 40)).sum().backward()  # with several replicas, gradients are means from here on
        >>> quantizer.bits, quantizer.controller.bits, quantizer.meter.total().steps
        (8, 4, 1)
        >>> dist.destroy_process_group()
    """
    return Quantizer(model, controller, replicas, **options)
