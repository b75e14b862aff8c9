"""The exchange between replicas of a model that FSDP2 shards, in place of its own all-reduce.

mesh = init_device_mesh("cuda", (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
quantizer = hvd_dyncomp.fsdp.compress(model, 4)
"""

from __future__ import annotations

from typing import Any

import torch

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.fsdp.quantizer import Quantizer
from hvd_dyncomp.policies import Policy

__all__ = ["Quantizer", "compress"]


def compress(
    model: torch.nn.Module,
    controller: Controller | Policy | float | None = None,
    *,
    replicas: Any = None,
    **arguments: Any,
) -> Quantizer:
    """Average the gradients of a sharded model over its replicas, compressed. Call it on every rank of the job.

    FSDP reduces gradients within each replica, as always. Each rank's shard of the result is then averaged over the
    ranks that have the same shard.

    Args:
        model: torch's `fully_shard` was applied to the model and to its submodules, with one mesh: either of replicas
            and shards (HSDP), or of the shards of one replica only. Either dimension may have size 1. The model must
            not be compressed already.
        controller: gives the number of bits; default: a constant level of 4 bits. For a policy or a level, `compress`
            creates a controller over all ranks of the job.
        replicas: connects the ranks that have the same shard: a `DeviceMesh` of one dimension or a process group. Only
            needed if the model's mesh has shards only.
        arguments: those of `DynamicQuantizer`: error_feedback, block_size, min_numel, skip,
            bucket_bytes, hierarchical, warmup_steps, warmup_bits. Sizes are those of this rank's shards.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the model cannot be compressed.
        LockstepError: another rank has raised such an error, or replicas differ. On all ranks that have no error of
            their own.
        TimeoutError, ConnectionError: another rank does not call it in time, or has ended.
        RuntimeError: the FSDP2 of this version of torch lacks something that hvd_dyncomp needs.
    """
    return Quantizer(model, controller, replicas, **arguments)
