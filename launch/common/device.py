"""Where ranks compute: all on CPUs, or each on a GPU of its machine. No training has run on a GPU."""

from __future__ import annotations

import ctypes
import os
import socket
from collections import Counter
from collections.abc import Sequence

import torch

from common.errors import RunError
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.transport.base import gather_json

_NO_GPU = "torch sees no GPU"
_SHARES_GPUS = 23000  # 2.30.0, as NCCL writes versions


def choose(wish: str) -> torch.device:
    """This rank's device. Collective.

    Args:
        wish: one of `common.values.DEVICES`; "auto": GPUs if all ranks can use one.

    Raises:
        RunError: GPUs are wished for, and a rank cannot use one; on every rank.
    """
    if wish == "cpu":
        return torch.device("cpu")
    found = gather_json(ranks.transport(), [_obstacle(), _gpus()], "device.found")
    obstacles = [text for text, _ in found if text]
    if not obstacles:
        chosen = share([gpus for _, gpus in found])
        obstacles = [crowded(len(chosen), len(set(chosen)))]
    if _decide(wish, obstacles[0]) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", _gpus().index(chosen[ranks.transport().rank]))
    torch.cuda.set_device(device)
    # Horovod's thread waits for all that is queued in the default stream before each message (docs/gpus.md). And
    # before there is an optimizer: its hooks run in the stream in which it was made.
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def choose_for(wish: str, workers: int, *, horovod: bool) -> str:
    """Where so many workers will compute that are to be started, all on this machine: "cpu" or "cuda".

    Args:
        horovod: whether they are Horovod's; otherwise they are torchrun's.

    Raises:
        RunError: as `choose`, before anybody waits for anything.
    """
    if wish == "cpu" or not horovod:
        return choose_alone(wish)
    return _decide(wish, _obstacle() or crowded(workers, torch.cuda.device_count()))


def choose_alone(wish: str) -> str:
    """Where processes compute that need no Horovod, whatever it was built for: "cpu" or "cuda".

    Raises:
        RunError: a GPU is wished for, and torch sees none.
    """
    return "cpu" if wish == "cpu" else _decide(wish, "" if torch.cuda.is_available() else _NO_GPU)


def share(seen: Sequence[Sequence[str]]) -> list[str]:
    """Each rank's GPU of those that it sees: the one that fewest ranks before it have.

    By the GPUs themselves and not by hosts: network namespaces and containers are hosts of their own, and yet share a
    machine's GPUs.

    Args:
        seen: by rank, the names of GPUs; one has the same name for all.
    """
    taken: Counter[str] = Counter()
    chosen = []
    for gpus in seen:
        chosen.append(min(gpus, key=taken.__getitem__))  # the first of equals
        taken[chosen[-1]] += 1
    return chosen


def crowded(workers: int, gpus: int) -> str:
    """Why so many workers cannot share so many GPUs; "" if they can."""
    if workers <= gpus:
        return ""
    if ranks.under_torchrun() or nccl_shares_gpus():  # else `nccl_refuses` has gradients go through main memory
        return ""
    import horovod.torch as hvd

    if not hvd.nccl_built():
        return ""
    return (
        f"{workers} workers would share {gpus} GPU{'' if gpus == 1 else 's'}, and NCCL, which Horovod was built with, "
        "takes one worker a GPU: start fewer, or build Horovod with HOROVOD_GPU=CUDA (docs/horovod.md, GPUs)"
    )


def nccl_refuses(device: torch.device) -> bool:
    """Whether two ranks compute on one GPU and their NCCL does not take that. Collective."""
    if device.type != "cuda":
        return False
    everyone = gather_json(ranks.transport(), [_gpus()[device.index], nccl_shares_gpus()], "device.of.ranks")
    gpus, shares = zip(*everyone, strict=True)
    return len(set(gpus)) < len(gpus) and not all(shares)


def nccl_shares_gpus() -> bool:
    """Whether NCCL takes several ranks on one GPU: from 2.30 on, if NCCL_MULTI_RANK_GPU_ENABLE=1 is set.

    Otherwise it refuses them ("Duplicate GPU detected"): kernels of two ranks wait for each other, and nothing says
    that a GPU runs both at the same time. Who sets the variable takes care of that, with NCCL_MAX_CTAS for example.
    """
    if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") != "1" or not torch.distributed.is_nccl_available():
        return False
    return _nccl_version() >= _SHARES_GPUS


def _nccl_version() -> int:
    """Of the library that is loaded, which LD_PRELOAD may have put in the place of torch's; 23007 for 2.30.7."""
    try:
        library = ctypes.CDLL("libnccl.so.2")  # by the name of what is loaded already
    except OSError:  # within torch's own libraries
        major, minor, patch, *_ = torch.cuda.nccl.version()
        return 10000 * major + 100 * minor + patch
    found = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(found))
    return found.value


def _decide(wish: str, obstacle: str) -> str:
    if wish == "cuda" and obstacle:
        raise RunError(f"--device cuda: {obstacle}")
    return "cpu" if obstacle else "cuda"


def _obstacle() -> str:
    if not torch.cuda.is_available():
        return _NO_GPU
    return ranks.transport().unsupported_reason(torch.device("cuda"))


def _gpus() -> list[str]:
    """Names of the GPUs that this process sees, the same for a GPU in every process."""
    here = socket.gethostname()
    properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    # Older torches have no names for them: there, hosts do not know that they share one.
    return [str(getattr(one, "uuid", f"{here} {number}")) for number, one in enumerate(properties)]
