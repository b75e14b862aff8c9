"""All ranks compress the same model, or none of them compresses any."""

from __future__ import annotations

import json
from typing import Any

from hvd_dyncomp import replicas
from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.wire import checksum
from hvd_dyncomp.transport.base import Transport, gather_json

SAME_ORDER = (
    "compress models in the same order on every rank (from a list, not from a set), and load checkpoints on every "
    "rank, or before DistributedDataParallel(...), which broadcasts the values of rank 0"
)


def description(named: replicas.Named, *, values: bool = True) -> list[Any]:
    """[name, shape, dtype, a checksum of the values, or 0 without `values`] of each parameter: plain data."""
    numbers = replicas.numbers(named, exact=True) if values else {}
    return [[name, list(one.shape), str(one.dtype), numbers.get(name, 0)] for name, one in named]


def agree(transport: Transport, mine: list[Any], error: Exception | None) -> int:
    """Compare this rank's model with the others', before any is compressed. Collective; blocks.

    Models are matched by the order of calls, so ranks may have different ones in hand, of the same names and shapes.

    Args:
        mine: the `description` of this rank's model.
        error: why this rank cannot compress it, or None.

    Returns:
        A checksum of the model, the same on all ranks.

    Raises:
        Exception: `error`.
        LockstepError: another rank has an error, or another model. On all ranks that have no error.
    """
    number = checksum(json.dumps(mine))
    report = {"model": number} if error is None else {"error": f"{type(error).__name__}: {error}"}
    reports = gather_json(transport, report, "hvd_dyncomp.compress")
    if error is not None:
        raise error
    for rank, theirs in enumerate(reports):
        if "error" in theirs:
            raise LockstepError(f"rank {rank} cannot compress its model: {theirs['error']}")
    if any(theirs != reports[0] for theirs in reports):
        everyone = gather_json(transport, mine, "hvd_dyncomp.compress.models")
        rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise LockstepError(
            f"the ranks compress different models: {_difference(everyone[0], everyone[rank], rank)}; {SAME_ORDER}"
        )
    return number


def _difference(ours: list[Any], theirs: list[Any], rank: int) -> str:
    """The first difference between rank 0's model and that of another rank, in words."""
    number = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if number is None:
        return f"rank 0's has {len(ours)} parameters, rank {rank}'s has {len(theirs)}"
    (name, *kind, _), (other, *others, _) = ours[number], theirs[number]
    if (name, kind) == (other, others):
        return f"parameter {name} has other values on rank {rank} than on rank 0"
    one, two = (f"{name} with {shape} values of {dtype}" for name, shape, dtype, _ in (ours[number], theirs[number]))
    return f"where rank 0's has parameter {one}, rank {rank}'s has {two}"
