"""The source of gradients: this rank's shards, which replicas average."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hvd_dyncomp.checks import shown
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.fsdp.units import Unit
from hvd_dyncomp.transport.base import Transport


def replica_group(replicas: Any, units: Sequence[Unit]) -> dist.ProcessGroup:
    """The process group of the ranks that have the same shards.

    Args:
        replicas: an argument; None for the replicas of the units' mesh.
        units: of the model, with one mesh.

    Raises:
        TypeError, ValueError: there is none, it is that of other ranks, or this process is no member.
    """
    own = units[0].replica_group
    if replicas is None:
        if own is None:
            raise ValueError(
                "replicas is missing, and the mesh that fully_shard was given has shards only: give fully_shard a mesh "
                "of two dimensions, replicas and shards, or pass replicas="
            )
        return own
    given = _group_of(replicas)
    ours, theirs = sorted(dist.get_process_group_ranks(given)), sorted(dist.get_process_group_ranks(own or given))
    if ours != theirs:
        raise ValueError(
            f"the mesh of fully_shard already has replicas, on ranks {theirs}: leave replicas= out, or pass the same "
            f"ranks; got replicas on ranks {ours}"
        )
    _check_shards_apart(ours, sorted(dist.get_process_group_ranks(units[0].shard_group)))
    return given


def _group_of(replicas: Any) -> dist.ProcessGroup:
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


def _check_shards_apart(replicas: Collection[int], shards: Collection[int]) -> None:
    """Raises: ValueError: two ranks of a group of replicas share the shards of one replica."""
    if len(set(replicas) & set(shards)) > 1:
        raise ValueError(
            f"replicas must connect ranks with the same shard, but ranks {replicas} of replicas and the ranks "
            f"{shards} of the mesh of shards have more in common than this rank"
        )


def _place(mesh: DeviceMesh, replicas: Collection[int]) -> tuple[int, int]:
    """This rank's number among the ranks of its own replica, and how many these are.

    Args:
        mesh: of a parameter: with all its axes, which may include that of the replicas.
        replicas: the ranks that have the same shard. Those that are not in the mesh do not matter.
    """
    [here] = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    alike = [place for rank in replicas for place in (mesh.mesh == rank).nonzero().tolist()]
    axes = [len({place[axis] for place in alike}) > 1 for axis in range(mesh.ndim)]
    own = tuple(here[axis] if across else slice(None) for axis, across in enumerate(axes))
    ranks = mesh.mesh[own].flatten().tolist()
    return ranks.index(dist.get_rank()), len(ranks)


class ShardGradients(Source):
    """The gradients of this rank's shards of one model.

    Args:
        units: of the model.
        among: connects the replicas.
        replicas: their ranks, as numbers in the whole job.
        label: as in `Source`.

    Attributes:
        place: this rank's among the ranks of its replica, and how many there are: those among which FSDP shards, and
            with tensor parallelism those of its dimension, too.
    """

    kind = "FSDP"
    own_memory = True  # what a hook gets is FSDP's

    def __init__(self, units: list[Unit], among: Transport, replicas: Collection[int], label: str) -> None:
        super().__init__(among)
        self.label = label
        self._units = units
        meshes: list[DeviceMesh] = [parameter.device_mesh for unit in units for parameter in unit.parameters]  # type: ignore[attr-defined]
        self.place = _place(max(meshes, key=DeviceMesh.size), replicas)
        self.named = [pair for unit in units for pair in unit.shards()]
        self.parts = {name: unit.name for unit in units for name in unit.names}

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [pair for unit in self._units for pair in zip(unit.names, unit.parameters, strict=True)]

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.parameters() if parameter.requires_grad]
