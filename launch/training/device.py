"""Where the ranks train: all on CPUs, or each on a GPU of its machine. Never run on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import horovod.torch as hvd
import torch
from torch import Tensor

from common.errors import RunError
from hvd_dyncomp.transport.horovod import HorovodTransport, gather_json

Batch = tuple[Tensor, Tensor]


def choose(wish: str) -> torch.device:
    """This rank's device. Collective.

    Args:
        wish: "cpu", "cuda", or "auto" for GPUs if all ranks can use one.

    Raises:
        RunError: GPUs are wished for, and a rank cannot use one; on every rank.
    """
    obstacles = [text for text in gather_json(_obstacle(), "device.obstacles") if text]
    if wish == "cuda" and obstacles:
        raise RunError(f"--device cuda: {obstacles[0]}")
    if wish == "cpu" or obstacles:
        return torch.device("cpu")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count())  # ranks may share one
    torch.cuda.set_device(device)
    # Horovod's thread waits for all that is queued in the default stream before each message (docs/clusters.md). And
    # before there is an optimizer: its hooks run in the stream in which it was made.
    torch.cuda.set_stream(torch.cuda.Stream(device))
    return device


def _obstacle() -> str:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    return HorovodTransport().obstacle(torch.device("cuda"))


def moved(batches: Iterable[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on a device; on the CPU they are left as they are."""
    for images, labels in batches:
        yield images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
