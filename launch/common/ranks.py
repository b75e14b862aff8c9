"""Who trains together: Horovod's workers or torchrun's, by the launcher that has started this process."""

from __future__ import annotations

import os

from hvd_dyncomp.transport import given_or_horovod
from hvd_dyncomp.transport.base import Transport, gather_json


def under_torchrun() -> bool:
    """Whether the workers are torchrun's, and train with DistributedDataParallel."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def start() -> None:
    """Has this process find the others. Collective."""
    if under_torchrun():
        import torch
        import torch.distributed as dist

        nccl = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
    else:
        import horovod.torch as hvd

        hvd.init()


def end() -> None:
    """Leave the others, when nothing more is exchanged. Otherwise torch complains where there is NCCL."""
    if under_torchrun():
        import torch.distributed as dist

        gather_json(transport(), None, "end")  # nobody needs rank 0's store any more
        dist.destroy_process_group()


def transport() -> Transport:
    """Among all workers, which have called `start`. Collective the first time."""
    if under_torchrun():
        from hvd_dyncomp import ddp

        return ddp.transport()
    return given_or_horovod(None)


def local_rank() -> int:
    """Number of this worker on its machine."""
    if under_torchrun():
        return int(os.environ["LOCAL_RANK"])
    import horovod.torch as hvd

    return hvd.local_rank()
