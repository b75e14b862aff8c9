"""The residuals of all buckets: saved and restored by parameter name."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.checks import boolean, integer, shown
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.kernels import RESIDUAL_DTYPE

logger = logging.getLogger(__name__)

# The order of a parameter's values in a saved state: as they are indexed, whatever the parameter's memory format.
LOGICAL = "logical"
# In a state: no residuals. "units" are FSDP2's, whose shapes are those of one shard.
NOTHING: dict[str, Any] = {"hosts": None, "residuals": {}, "shard_residuals": {}, "units": {}}


def export(buckets: list[Bucket]) -> dict[str, Any]:
    """Copy both kinds of residuals into main memory.

    Returns:
        "residuals": {parameter name: bfloat16 tensor of its shape}; "order": `LOGICAL`, that of their values;
        "shard_residuals": {bucket name: {"first": where in the bucket the shard begins, "carries": bool, "values": (own
        shard,) bfloat16, "slots": {name of a parameter of the bucket: {"start": as in `Slot`, "order": likewise}}}}.
    """
    own, shards = {}, {}
    for bucket in buckets:
        residuals = bucket.residuals
        if not residuals.enabled:
            continue
        whole = torch.zeros(bucket.blocks * bucket.block_size, dtype=RESIDUAL_DTYPE, device=bucket.device)
        whole[residuals.own_range] = residuals.own
        for slot in bucket.slots:
            own[slot.name] = slot.logical(whole).to("cpu", copy=True, memory_format=torch.contiguous_format)
        shards[bucket.name] = {
            "first": residuals.shard_range.start,
            "carries": residuals.carries,
            "values": residuals.shard.to("cpu", copy=True),
            "slots": _places(bucket),
        }
    return {"residuals": own, "shard_residuals": shards, "order": LOGICAL}


def _places(bucket: Bucket) -> dict[str, dict[str, Any]]:
    """Where in the bucket its parameters are."""
    return {slot.name: {"start": slot.start, "order": list(slot.order)} for slot in bucket.slots}


def checked(state: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of a state, with the types and ranges that `restore` needs.

    Raises:
        KeyError, TypeError, ValueError: the state is different.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"state must be a mapping, got {shown(state)}")
    # A copy: it is restored only at the first gradient, and its owner may change it before.
    own = copy.deepcopy(dict(state))
    size = integer("world_size", own["world_size"], 1)
    if own["rank"] is not None:
        integer("rank", own["rank"], 0, size - 1)
    if own.get("hosts") is not None:
        ranks = [integer("hosts", rank, 0) for host in own["hosts"] for rank in host]
        if sorted(ranks) != list(range(size)) or not all(own["hosts"]):
            raise ValueError(f"hosts must list every rank once, got {shown(own['hosts'])}")
    if own["residuals"] and own["order"] != LOGICAL:
        raise ValueError(f"order must be {LOGICAL!r}, got {shown(own['order'])}")
    for name, values in dict(own["residuals"]).items():
        _check_values(f"residuals[{name!r}]", values)
    for name, shard in dict(own["shard_residuals"]).items():
        _check_values(f"the shard residuals of {name!r}", shard["values"])
        if shard["values"].dim() != 1:
            raise ValueError(f"the shard residuals of {name!r} must have one dimension, got {shown(shard['values'])}")
        integer("first", shard["first"], 0)
        boolean("carries", shard["carries"])
        for slot, place in shard["slots"].items():
            integer(f"start of {slot!r}", place["start"], 0)
            order = [integer(f"order of {slot!r}", dim, 0) for dim in place["order"]]
            if sorted(order) != list(range(own["residuals"][slot].dim())):
                raise ValueError(f"order of {slot!r} must have each of its dimensions once, got {shown(order)}")
    return own


def _check_values(name: str, values: Any) -> None:
    dense = isinstance(values, torch.Tensor) and values.layout is torch.strided and values.dtype is RESIDUAL_DTYPE
    if not dense or not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be a dense tensor of finite bfloat16, got {shown(values)}")


def check(buckets: list[Bucket], state: Mapping[str, Any], rank: int, world_size: int) -> None:
    """Check that `restore` can use this state.

    Raises:
        ValueError: it belongs to another rank or other parameters.
    """
    if state["rank"] not in (rank, None) and state["world_size"] > 1:  # alone, nothing waits
        raise ValueError(
            f"state was saved on rank {state['rank']}, but is loaded on rank {rank}: every rank has its own residuals, "
            "so save and load one state_dict per rank"
        )
    saved: Mapping[str, torch.Tensor] = state["residuals"]
    carrying = [bucket for bucket in buckets if bucket.residuals.enabled]
    if not saved or not carrying:
        return
    shapes = {slot.name: slot.shape for bucket in carrying for slot in bucket.slots}
    theirs = {name: tuple(tensor.shape) for name, tensor in saved.items()}
    for name in sorted({*shapes, *theirs}):
        if shapes.get(name) != theirs.get(name):
            raise ValueError(
                f"state has residuals of other parameters: {name} has shape {theirs.get(name)} in the state and "
                f"{shapes.get(name)} in this model (None: no residual there); use the model and the skip= of the saved "
                "run, or start without this state"
            )


def restore(
    buckets: list[Bucket], state: Mapping[str, Any], rank: int, world_size: int, hosts: list[list[int]] | None
) -> None:
    """Restore what `export` saved. Checks everything before it changes anything.

    On as many ranks, on the same hosts, each parameter gets its own residual, also in other buckets. A shard's residual
    is restored if its bucket is the same. Otherwise all residuals begin at zero, and rank 0 says so.

    Args:
        hosts: as in `Plan`.

    Raises:
        ValueError: as in `check`.
    """
    check(buckets, state, rank, world_size)
    for bucket in buckets:
        bucket.residuals.drop()
    if not state["residuals"]:  # saved before the first step, or without error feedback
        return
    if (state["world_size"], state.get("hosts")) != (world_size, hosts):
        if waiting(state):
            warn_of_loss(rank)
        return
    for bucket in buckets:
        residuals = bucket.residuals
        if not residuals.enabled:
            continue
        whole = torch.zeros(bucket.blocks * bucket.block_size, dtype=RESIDUAL_DTYPE, device=bucket.device)
        for slot in bucket.slots:
            slot.logical(whole).copy_(state["residuals"][slot.name])
        residuals.own.copy_(whole[residuals.own_range])
        shard = state["shard_residuals"].get(bucket.name)
        same = shard is not None and shard["slots"] == _places(bucket)
        residuals.carries = shard["carries"] if same else waiting(state)
        if same and (shard["first"], shard["values"].shape) == (residuals.shard_range.start, residuals.shard.shape):
            residuals.shard.copy_(shard["values"])


def waiting(state: Mapping[str, Any]) -> bool:
    """Whether any residual of a state may be nonzero."""
    return any(shard["carries"] for shard in state["shard_residuals"].values())


def warn_of_loss(rank: int) -> None:
    """Say that residuals begin at zero."""
    if rank == 0:
        logger.warning(
            "the number of ranks has changed since the residuals were saved, or the hosts on which they are: residuals "
            "begin at zero, and what earlier steps have not delivered is lost (docs/checkpoints.md#checkpoints)"
        )
