"""The residuals of all buckets: saved and restored by parameter name, and compared with the gradients."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvd_dyncomp.checks import boolean, finite, integer, shown
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.slots import logical
from hvd_dyncomp.kernels import RESIDUAL_DTYPE, rounded

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
        shard,) bfloat16, "slots": {name of a parameter in it: {"start": as in `Slot`, "order": likewise}}}}.
    """
    own, shards = {}, {}
    for bucket in buckets:
        if not bucket.residuals.enabled:
            continue
        undelivered = bucket.residuals.undelivered()
        for slot in bucket.slots:
            own[slot.name] = slot.logical(undelivered).to("cpu", copy=True, memory_format=torch.contiguous_format)
        shards[bucket.name] = {
            "first": bucket.residuals.shard_range.start,
            "carries": bucket.residuals.carries,
            "values": bucket.residuals.shard.to("cpu", copy=True),
            "slots": _places(bucket, bucket.residuals.shard_range),
        }
    return {"residuals": own, "shard_residuals": shards, "order": LOGICAL}


def _places(bucket: Bucket, part: slice) -> dict[str, dict[str, Any]]:
    """Where in the bucket the parameters are that have values in a part of it."""
    slots = [slot for slot in bucket.slots if slot.start < part.stop and slot.start + slot.numel > part.start]
    return {slot.name: {"start": slot.start, "order": list(slot.order)} for slot in slots}


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
    if finite("factor", own["factor"]) <= 0:
        raise ValueError(f"factor must be more than 0, got {shown(own['factor'])}")
    if own.get("hosts") is not None:
        ranks = [integer("hosts", rank, 0) for host in own["hosts"] for rank in host]
        if sorted(ranks) != list(range(size)) or not all(own["hosts"]):
            raise ValueError(f"hosts must list every rank once, got {shown(own['hosts'])}")
    if own["residuals"] and own["order"] != LOGICAL:
        raise ValueError(f"order must be {LOGICAL!r}, got {shown(own['order'])}")
    for name, values in dict(own["residuals"]).items():
        _check_values(f"residuals[{name!r}]", values)
    for name, shard in [(each, shard) for each in own["shard_residuals"] for shard in _shards(own, each)]:
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


def merged(states: Iterable[Mapping[str, Any]], ranks: int) -> dict[str, Any] | None:
    """What each of `ranks` ranks takes over in place of the ranks that had `states`. None if there are none.

    An equal part of all residuals: no other parts of their sum are as small, and what is large beside a gradient is
    not delivered at once. "shard_residuals" have a list of shards in place of one.
    """
    first: Mapping[str, Any] | None = None
    own: dict[str, torch.Tensor] = {}
    shards: dict[str, list[dict[str, Any]]] = {}
    for state in states:
        first = first or {key: state[key] for key in ("world_size", "factor", "order", "units") if key in state}
        for name, values in state["residuals"].items():
            part = values.to(torch.float32) / ranks
            own[name] = own[name].add_(part) if name in own else part
        for name in state["shard_residuals"]:
            parts = [{**shard, "values": shard["values"].to(torch.float32) / ranks} for shard in _shards(state, name)]
            shards.setdefault(name, []).extend(parts)
    return None if first is None else {**first, "hosts": None, "residuals": own, "shard_residuals": shards}


def _shards(state: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Those of a bucket; a state of one rank has one at most."""
    found = state["shard_residuals"].get(name, [])
    return found if isinstance(found, list) else [found]


def _check_values(name: str, values: Any) -> None:
    # `merged` makes float32; they are rounded when they are put back.
    dense = isinstance(values, torch.Tensor) and values.layout is torch.strided
    known = dense and values.dtype in (RESIDUAL_DTYPE, torch.float32)
    if not known or not bool(values.isfinite().all()):
        raise ValueError(f"{name} must be a dense tensor of finite bfloat16 or float32, got {shown(values)}")


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


def restore(buckets: list[Bucket], state: Mapping[str, Any], rank: int, world_size: int, factor: float) -> None:
    """Restore what `export` saved. Checks everything before it changes anything.

    A residual r adds factor * r to the result. If the number of workers changed, and the factor with it, r is scaled so
    that it still adds the same. The residual of a shard that moved joins the residuals of its own rank, from where it
    also arrives once, also where buckets are others; so do residuals of values that another rank now quantizes. Sums
    are float32, and rounded when they are restored.

    Args:
        factor: multiplies sums over ranks now; state["factor"] is the former one.

    Raises:
        ValueError: as in `check`.
    """
    check(buckets, state, rank, world_size)
    if state["residuals"] and state["world_size"] > world_size and state["rank"] is not None:
        logger.warning(
            "the state was saved on rank %d of %d ranks, but there are now %d ranks, so the residuals of the ranks "
            "that no longer exist are lost; to keep the residuals of all ranks, save with AllRanks",
            state["rank"],
            state["world_size"],
            world_size,
        )
    scale = state["factor"] / factor
    kept = {bucket.name: shard for bucket in buckets if (shard := _own_shard(bucket, state)) is not None}
    moved = _moved(state, kept)
    for bucket in buckets:
        residuals = bucket.residuals
        if not residuals.enabled:
            continue
        residuals.drop()
        if not state["residuals"]:  # saved before the first step, or without error feedback
            continue
        undelivered = torch.zeros(bucket.blocks * bucket.block_size, dtype=torch.float32, device=bucket.device)
        for slot in bucket.slots:
            slot.logical(undelivered).copy_(state["residuals"][slot.name])
            if slot.name in moved:
                slot.logical(undelivered).add_(moved[slot.name].to(bucket.device))
        shard = kept.get(bucket.name)
        residuals.carries = shard is None or shard["carries"]
        if shard is not None:
            residuals.shard.copy_(rounded(shard["values"].to(torch.float32) * scale))
        if scale != 1:
            undelivered *= scale
        residuals.put(undelivered)


def _own_shard(bucket: Bucket, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A bucket's shard of the state, if this rank has the same one now."""
    part, saved = bucket.residuals.shard_range, _shards(state, bucket.name)
    if len(saved) != 1 or saved[0]["slots"] != _places(bucket, part):
        return None
    same = saved[0]["first"] == part.start and saved[0]["values"].shape == bucket.residuals.shard.shape
    return saved[0] if same else None


def _moved(state: Mapping[str, Any], kept: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """The residuals of all shards that are not `kept`: float32, by parameter's name, of its shape."""
    stored: dict[str, torch.Tensor] = {}
    orders: dict[str, list[int]] = {}
    shards = [(bucket, shard) for bucket in state["shard_residuals"] for shard in _shards(state, bucket)]
    for shard in (shard for bucket, shard in shards if shard is not kept.get(bucket)):
        first, values = shard["first"], shard["values"].to("cpu", torch.float32)
        for name, place in shard["slots"].items():
            start, shape = place["start"], state["residuals"][name].shape
            begin, end = max(first, start), min(first + len(values), start + shape.numel())
            if begin < end:
                if name not in stored:  # all states come from one run, so there is one order
                    stored[name] = torch.zeros(shape.numel(), dtype=torch.float32, device="cpu")
                    orders[name] = place["order"]
                stored[name][begin - start : end - start] += values[begin - first : end - first]
    return {name: logical(values, state["residuals"][name].shape, orders[name]) for name, values in stored.items()}
