"""Who takes part in a benchmark: Horovod's and torch's ways to exchange gradients, and ours, behind one face.

none, fp16             Horovod without compression, and with hvd.Compression.fp16
0.125bit ... 32bit     hvd_dyncomp at a constant level; on hosts of several workers, hierarchical
1bit-flat ...          the same, flat: whatever the hosts
1bit-ddp ...           the same as 1bit, for torch's DistributedDataParallel: without Horovod
ddp-defaults,          ddp and 4bit-ddp in a DistributedDataParallel without arguments; all others have gradients that
4bit-ddp-defaults      are views of buckets, and ours have buckets of 8 MiB
ddp, ddp-fp16,         torch's DistributedDataParallel over Gloo, without and with its hooks of these names; over NCCL
ddp-bf16               where every worker has a GPU of its own, or NCCL takes several workers a GPU (NCCL 2.30 with
                       NCCL_MULTI_RANK_GPU_ENABLE=1)
powersgd1, powersgd4   the same with its PowerSGD hook, of rank 1 and 4
hsdp, hsdp-bf16        torch's FSDP2, parameters sharded within each host: its own all-reduce between hosts, of float32
                       and with reduce_dtype=bfloat16
1bit-fsdp ...          the same with hvd_dyncomp.fsdp between hosts
shards-alone           the same without any exchange between hosts
ddp-fp16-x4,           the same as without -x4, but with four batches a step, of which three are under no_sync(); times
4bit-ddp-x4 ...        in tables are per batch
alone                  no exchange at all: what forward, backward and update take by themselves

--launcher torchrun does without Horovod: it has alone, and all methods of DDP and FSDP2. There the default of --methods
has DDP's in place of Horovod's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.sharded import SHARDED, shard
from hvd_dyncomp.commands.probe.methods import (
    ALONE,
    DDP,
    HOROVOD,
    ONE_LEVEL,
    OURS,
    OURS_IN_DDP,
    TORCHS,
    Loss,
    Stepper,
)
from hvd_dyncomp.commands.ranks import transport, under_torchrun

BATCHES = 4  # of a step that accumulates
ACCUMULATES = f"-x{BATCHES}"  # what the names of such methods end with
# What stands in for those that need it.
_IN_PLACE_OF = {"none": "ddp", "fp16": "ddp-fp16", **OURS_IN_DDP}
ACCUMULATED = tuple(f"{name}{ACCUMULATES}" for name in ("ddp", "ddp-fp16", *OURS_IN_DDP.values()))
NAMES = (ALONE, *HOROVOD, *OURS, *ONE_LEVEL.values(), *DDP, *ACCUMULATED, *SHARDED)
WITHOUT_HOROVOD = (ALONE, *DDP, *ACCUMULATED, *SHARDED)
_MAIN = ("0.25bit", "1bit", "4bit", "8bit")
_IN_DDP = (*TORCHS, *(OURS_IN_DDP[name] for name in _MAIN))
DEFAULT = (ALONE, *HOROVOD, "0.25bit", "1bit", "2bit", "4bit", "8bit", "16bit", "32bit", *_IN_DDP)


def without_horovod(names: Iterable[str]) -> tuple[str, ...]:
    """What is measured without Horovod in place of these: DDP's of Horovod's, and those that need no Horovod."""
    found = dict.fromkeys(_IN_PLACE_OF.get(name, name) for name in names)
    return tuple(name for name in found if name in WITHOUT_HOROVOD)


class _Accumulating(Stepper):
    """A method of DDP whose step has several batches, and exchanges their sum once."""

    def step(self) -> Tensor:
        model: Any = self._model  # a DistributedDataParallel
        with model.no_sync():
            for _ in range(BATCHES - 1):
                self._loss(self._model).backward()
        return super().step()


def stepper_of(name: str, model: nn.Module, loss: Loss, mesh: DeviceMesh | None = None, **arguments: Any) -> Stepper:
    """The stepper of any method.

    Args:
        name: one of `NAMES`.
        mesh: for those of FSDP2, that of `sharded.mesh`.
        model, loss, arguments: as in `Stepper`.
    """
    if name in ACCUMULATED:
        return _Accumulating(name.removesuffix(ACCUMULATES), model, loss, **arguments)
    if name not in SHARDED:
        return Stepper(name, model, loss, **arguments)
    if mesh is None:
        raise ValueError(f"{name} needs a mesh")
    shard(name, model, mesh)
    return Stepper(ALONE, model, loss, **arguments)  # FSDP2 has exchanged when backward ends


def start_torch(backend: str, methods: Iterable[str]) -> None:
    """Bring up torch's process group beside Horovod's, if methods need it. Collective. Reads MASTER_ADDR, MASTER_PORT.

    Args:
        backend: "gloo", or "nccl" where every rank has chosen a GPU, and NCCL takes those.
        methods: of `NAMES`.
    """
    if not under_torchrun() and any(name in (*DDP, *ACCUMULATED, *SHARDED) for name in methods):
        everybody = transport()
        torch.distributed.init_process_group(backend, rank=everybody.rank, world_size=everybody.size)
