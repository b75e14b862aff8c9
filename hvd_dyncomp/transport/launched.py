"""How many processes train together, before anything connects them."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import torch

# How many processes mpirun, horovodrun, torchrun, srun and others have started, in the words of each.
_SIZES = ("WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def processes() -> int:
    """How many train together: by Horovod or torch's process group where one is initialized, or else by the launcher.

    Not collective.
    """
    horovod = initialized_horovod()
    if horovod is not None:
        return horovod.size()
    if has_process_group():
        return torch.distributed.get_world_size()
    return max([1, *by_launcher().values()])


def by_launcher() -> dict[str, int]:
    """How many a launcher has started, by the variable that says so."""
    return {name: int(size) for name in _SIZES if (size := os.environ.get(name, "")).isdecimal()}


def missing(connected: int) -> str:
    """What is wrong if fewer ranks are connected than a launcher has started; "" if nothing is.

    Horovod knows its own launchers only: under another one, each rank takes itself for the only one.

    Args:
        connected: how many ranks are connected.
    """
    started = by_launcher()
    name = max(started, key=started.__getitem__, default="")
    # Any of several launchers' numbers will do, except 1: mpirun within a step of srun has its own.
    if connected >= started.get(name, 1) or 1 < connected in started.values():
        return ""
    return (
        f"{connected} rank{'s are' if connected > 1 else ' is'} connected, but {name}={started[name]} says that "
        f"{started[name]} were started: start them as docs/clusters.md says, or unset {name} if it is of another job"
    )


def rank_by_launcher() -> int:
    """Which of the processes this is, as its launcher says; 0 without one."""
    return next((int(rank) for name in _RANKS if (rank := os.environ.get(name, "")).isdecimal()), 0)


def initialized_horovod() -> ModuleType | None:
    """Horovod, if it is initialized."""
    horovod = sys.modules.get("horovod.torch")
    return horovod if horovod is not None and horovod.is_initialized() else None


def has_process_group() -> bool:
    """Whether torch's default process group is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
