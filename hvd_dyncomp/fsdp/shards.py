"""The source of gradients: this rank's shards, which replicas average."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_dyncomp.checks import shown
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.fsdp.units import Unit
from hvd_dyncomp.transport.base import Transport


def group_of(replicas: Any) -> dist.ProcessGroup:
    """The process group of an argument `replicas`.

    Raises:
        TypeError, ValueError: it has none, or this process is no member.
    """
    if isinstance(replicas, DeviceMesh):
        if replicas.ndim != 1:
            raise ValueError(
                f'replicas must be a mesh of one dimension, such as mesh["replicate"], got {shown(replicas)}'
            )
        replicas = replicas.get_group()
    if replicas is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(
            f"replicas must have this process, rank {dist.get_rank()} of all, as a member; pass the group that has it"
        )
    if not isinstance(replicas, dist.ProcessGroup):
        raise TypeError(f"replicas must be a process group or a mesh of one dimension, got {shown(replicas)}")
    return replicas


def check_replicas(replicas: dist.ProcessGroup, unit: Unit) -> None:
    """Raises: ValueError: two ranks of a group of replicas share the shards of one replica."""
    ours = set(dist.get_process_group_ranks(replicas)), set(dist.get_process_group_ranks(unit.shard_group))
    if len(set.intersection(*ours)) > 1:
        raise ValueError(
            f"replicas must connect ranks with the same shard, but ranks {sorted(ours[0])} of replicas and the ranks "
            f"{sorted(ours[1])} of the mesh of shards have more in common than this rank"
        )


class ShardGradients(Source):
    """The gradients of this rank's shards of one model.

    Args:
        units: of the model.
        among: connects the replicas.
        label: as in `Source`.

    Attributes:
        place: this rank's among the ranks of its replica, and how many there are: those among which FSDP shards, and
            with tensor parallelism those of its dimension, too.
    """

    kind = "FSDP"
    own_memory = True  # what a hook gets is FSDP's

    def __init__(self, units: list[Unit], among: Transport, label: str) -> None:
        super().__init__(among)
        self.label = label
        self._units = units
        meshes: list[DeviceMesh] = [parameter.device_mesh for unit in units for parameter in unit.parameters]  # type: ignore[attr-defined]
        ranks = max(meshes, key=DeviceMesh.size).mesh.flatten().tolist()
        self.place = ranks.index(dist.get_rank()), len(ranks)
        self.named = [pair for unit in units for pair in unit.shards()]
        self.parts = {name: unit.name for unit in units for name in unit.names}

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [pair for unit in self._units for pair in zip(unit.names, unit.parameters, strict=True)]

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]
