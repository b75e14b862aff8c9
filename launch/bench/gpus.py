"""Benchmarks on this machine's GPUs: how their files are called, and what a reader must know of them.

All hosts of a benchmark are namespaces of one machine, and so all workers share its GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from common.device import nccl_shares_gpus
from common.launcher import TORCHRUN
from netlab.shaping import INTERFACE

# NCCL knows hosts by their names, and takes between two of them what is fastest: it must be the link that is measured.
OVER_LINKS = {"NCCL_SOCKET_IFNAME": INTERFACE, "NCCL_IB_DISABLE": "1"}
# With one worker a host nothing else is needed: hosts are namespaces, and share the machine's memory and GPUs.
OVER_LINKS_ONLY = {**OVER_LINKS, "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}


def on_gpus(results: Mapping[str, Any]) -> bool:
    """Whether a file's figures are of GPUs; files from before there were any do not say."""
    return results.get("device", "cpu") == "cuda"


def found(workers: int, by: str) -> dict[str, Any]:
    """The GPUs that so many workers of a launcher use, and what carries their tensors: by Horovod, and by DDP."""
    count = min(workers, torch.cuda.device_count())
    takes = torch.distributed.is_nccl_available() and (workers == count or nccl_shares_gpus())
    names = [torch.cuda.get_device_name(number) for number in range(count)]
    return {"gpus": names, **({} if by == TORCHRUN else _horovod()), "ddp": "nccl" if takes else "gloo"}


def _horovod() -> dict[str, str]:
    import horovod.torch as hvd

    return {"horovod": "NCCL" if hvd.nccl_built() else "host memory"}


def sentence(about: Mapping[str, Any], workers: int) -> str:
    """What `found` has, for who reads the figures; "" for those of CPUs."""
    if "gpus" not in about:
        return ""
    names = dict.fromkeys(about["gpus"])
    count = len(about["gpus"])
    shared = f", shared by {workers} workers" if workers > count else ""
    horovod = f"Horovod goes through {about['horovod']}, " if "horovod" in about else ""
    return f" On {count} GPU{'' if count == 1 else 's'} ({', '.join(names)}){shared}; {horovod}DDP over {about['ddp']}."
