"""What decides the course of a run, as plain data: written down with it, compared before anything goes on from it."""

from __future__ import annotations

import argparse
import json
from typing import Any

# Flags that a run may be resumed without; everything else must be the same.
_FREE = ("output_dir", "data_dir", "resume", "stop_after", "progress", "tensorboard", "profile", "device", "dataset")


def course(args: argparse.Namespace, dataset: str, world_size: int, *, ddp: bool = False) -> dict[str, Any]:
    """The flags that matter, the data set that ``--dataset auto`` led to and the world size, as JSON would return it.

    Args:
        args: what ``options.parse`` returned.
        dataset: the data set's own name.
        world_size: number of ranks.
        ddp: whether they train with DistributedDataParallel, whose sums are not Horovod's bit for bit.
    """
    chosen: dict[str, Any] = {key: value for key, value in vars(args).items() if key not in _FREE}
    if args.schedule is not None:
        chosen["schedule"] = sorted(args.schedule.items())
    if ddp:
        chosen["framework"] = "DistributedDataParallel"
    return json.loads(json.dumps({**chosen, "dataset": dataset, "world_size": world_size}))


def differences(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    """Everything in which two courses differ, with both values; an empty string where they are the same."""
    keys = sorted(theirs.keys() | ours.keys())
    return ", ".join(
        f"{key} {theirs.get(key)} (now {ours.get(key)})" for key in keys if theirs.get(key) != ours.get(key)
    )
