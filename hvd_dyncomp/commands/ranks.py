"""The ranks of the job that a launcher has started: those of torchrun, or else Horovod's."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from hvd_dyncomp.transport import given_or_horovod
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.launched import has_process_group, missing


class RanksMissing(Exception):
    """Fewer ranks are connected than a launcher has started."""


def under_torchrun() -> bool:
    """Whether torchrun has started the ranks, which then train with DistributedDataParallel."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def start(backend: str = "nccl") -> None:
    """Connect this rank with the others. Collective.

    Args:
        backend: under torchrun, what carries tensors on GPUs: "nccl" where this torch has NCCL and a GPU, or "gloo".
            Gloo carries those on CPUs.

    Raises:
        ImportError: other than under torchrun: Horovod is not installed.
        RanksMissing: fewer ranks are connected than a launcher has started.
    """
    if under_torchrun():
        nccl = backend == "nccl" and torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if nccl else "gloo")
    else:
        import horovod.torch as hvd

        hvd.init()
    if text := missing(transport().size):
        raise RanksMissing(text)


def end() -> None:
    """Leave torch's process group, if there is one, when nothing more is exchanged. Otherwise NCCL complains."""
    if has_process_group():
        barrier()  # nobody needs rank 0's store any more
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all ranks. Collective."""
    if under_torchrun():
        dist.all_reduce(torch.zeros(1))  # by Gloo: torch's own barrier would have a GPU wait as well
    else:
        import horovod.torch as hvd

        hvd.barrier()


def transport() -> Transport:
    """The transport among all ranks, which have called `start`. Collective the first time."""
    if under_torchrun():
        from hvd_dyncomp.transport import torch_distributed

        return torch_distributed.transport()
    return given_or_horovod(None)


def local_rank() -> int:
    """Number of this rank among those of its host."""
    if under_torchrun():
        return int(os.environ["LOCAL_RANK"])
    import horovod.torch as hvd

    return hvd.local_rank()
