"""torch's FSDP2 as methods: each host holds the parameters once, in shards, and hosts average their gradients.

In all of them the parameters are gathered, and the gradients reduced, within a host in float32 by torch, but for
hsdp-bf16, whose gradients are bfloat16 within the host as well.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hvd_dyncomp import LEVELS

SHARDS_ALONE = "shards-alone"
NATIVE = ("hsdp", "hsdp-bf16")
OURS_SHARDED = tuple(f"{bits}bit-fsdp" for bits in LEVELS)
SHARDED = (SHARDS_ALONE, *NATIVE, *OURS_SHARDED)
_BLOCKS = nn.TransformerEncoderLayer  # modules that are gathered one after the other


def mesh(device: torch.device, hosts: int, workers: int) -> DeviceMesh:
    """The process groups of all methods. Collective; needs torch's process group, with ranks placed host by host.

    Args:
        device: of the parameters.
        hosts: the dimension "replicate".
        workers: of each host: the dimension "shard".
    """
    return init_device_mesh(device.type, (hosts, workers), mesh_dim_names=("replicate", "shard"))


@functools.cache
def _with_backend(mesh: DeviceMesh) -> DeviceMesh:
    """A mesh of the same ranks whose replicas exchange gradients by this package. Collective."""
    from hvd_dyncomp import fsdp

    fsdp.register_backend()
    override: dict[Any, Any] = {"replicate": "hvd_dyncomp"}
    names = mesh.mesh_dim_names
    return init_device_mesh(mesh.device_type, tuple(mesh.shape), mesh_dim_names=names, backend_override=override)


def shard(name: str, model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model within each host, in place, and average its gradients between hosts. Collective.

    Args:
        name: one of `SHARDED`.
        model: its parameters become DTensors, so optimizers are made afterwards.
        mesh: that of `mesh`.
    """
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # takes a second, and the others do without

    # It warns of every model that ends in a linear layer. Nothing here changes the output in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    meshes = {**dict.fromkeys(NATIVE, lambda: mesh), **dict.fromkeys(OURS_SHARDED, lambda: _with_backend(mesh))}
    options: dict[str, Any] = {"mesh": meshes.get(name, lambda: mesh["shard"])()}
    if name == "hsdp-bf16":
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
    for module in model.modules():
        if isinstance(module, _BLOCKS):
            fully_shard(module, **options)
    fully_shard(model, **options)
    if name in OURS_SHARDED:
        from hvd_dyncomp import fsdp

        fsdp.attach(model, float(name.partition("bit")[0]))
