"""Saving and restoring what error feedback carries, by parameter name."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.buckets import Bucket

logger = logging.getLogger(__name__)

KEYS = ("residuals", "shard_residuals")


def export(buckets: list[Bucket]) -> dict[str, Any]:
    """Copies of both residuals, in main memory.

    Returns:
        "residuals": {parameter name: float32 tensor of its shape};
        "shard_residuals": {bucket name: {"plan": checksum, "carries": bool, "values": (own shard,) float32}}.
    """
    own, shards = {}, {}
    for bucket in buckets:
        if bucket.residuals is None:
            continue
        for slot in bucket.slots:
            own[slot.name] = bucket.residuals.own[slot.range].view(slot.shape).to("cpu", copy=True)
        values = bucket.residuals.shard.to("cpu", copy=True)
        shards[bucket.name] = {"plan": bucket.plan, "carries": bucket.carries, "values": values}
    return {"residuals": own, "shard_residuals": shards}


def restore(buckets: list[Bucket], state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Puts back what `export` saved. Checks everything before it changes anything.

    Where buckets or the number of workers have changed, a shard's residual has no place any more: it is left out, with
    a warning. It is the smaller part, at most half a quantization step of one exchange.

    Raises:
        ValueError: the state is another rank's, or of other parameters.
    """
    if state["world_size"] == world_size and state["rank"] != rank:
        raise ValueError(
            f"state is that of rank {state['rank']}, loaded on rank {rank}: residuals are each rank's own, "
            "so save and load one state_dict per rank"
        )
    carrying = [(bucket, bucket.residuals) for bucket in buckets if bucket.residuals is not None]
    if not carrying:
        return
    saved: Mapping[str, torch.Tensor] = state["residuals"]
    if not saved:  # saved before the first step, or without error feedback
        for bucket, (own, own_shard) in carrying:
            own.zero_()
            own_shard.zero_()
            bucket.carries = False
        return
    shapes = {slot.name: slot.shape for bucket, _ in carrying for slot in bucket.slots}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in sorted({*shapes, *theirs}):
        if shapes.get(name) != theirs.get(name):
            raise ValueError(
                f"state has residuals of other parameters: {name} has shape {theirs.get(name)} there and "
                f"{shapes.get(name)} in this optimizer"
            )
    for bucket, (own, own_shard) in carrying:
        for slot in bucket.slots:
            own[slot.range].view(slot.shape).copy_(saved[slot.name])
        shard = state["shard_residuals"].get(bucket.name)
        if shard is not None and shard["plan"] == bucket.plan:
            own_shard.copy_(shard["values"])
            # Not "is anything non-zero": whether a step adds residuals must be the same on all ranks.
            bucket.carries = shard["carries"]
        else:
            own_shard.zero_()
            bucket.carries = True
            logger.warning(
                "bucket %s: buckets or number of workers changed; its shard residual is dropped", bucket.name
            )
