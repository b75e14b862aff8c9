"""Makes sure, before the first gradient travels, that the ranks' optimizers can work together at all.

Collectives of Horovod meet by name. Ranks with different parameters, or with buckets of another size, would wait for
each other without end, or decode what another rank never meant; here they tell each other first, in words.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from hvd_dyncomp.errors import JOINED, LockstepError
from hvd_dyncomp.transport import horovod as comm

# One name for all optimizers: ranks that have different ones must meet, too. It is free again when `introduce` returns.
_NAME = "hvd_dyncomp.introduction"
_HINTS = {
    "steps so far": " (was its state loaded on every rank? elastic training: give it to hvd.elastic.TorchState)",
    "bits": " (have the controllers seen the same epochs? elastic training: give it to hvd.elastic.TorchState)",
}


def introduce(
    settings: dict[str, Any], parameters: Iterable[tuple[str, tuple[int, ...]]], carries: bool, process_set
) -> bool:
    """Compares what the ranks of a process set are about to do. Collective, blocking; once per optimizer.

    Args:
        settings: plain data, by the names that error messages use.
        parameters: name and shape of everything that is reduced, in order.
        carries: whether residuals have been carried over to this rank. It may differ: who joins a job has none.

    Returns:
        Whether residuals have been carried over to any rank.

    Raises:
        LockstepError: a rank differs from rank 0, or could not get this far; the text says in what.
    """
    # Lists, as JSON returns them.
    named = [[name, list(shape)] for name, shape in parameters]
    mine = {"settings": settings, "parameters": named, "carries": carries}
    everyone = _meet(mine, process_set)
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise LockstepError(f"rank {rank} cannot use its DynamicQuantizer: {theirs['error']}")
    for rank, theirs in enumerate(everyone):
        difference = _difference(everyone[0], theirs, rank)
        if difference:
            raise LockstepError(f"the ranks' DynamicQuantizers do not fit together: {difference}")
    return any(theirs["carries"] for theirs in everyone)


def give_up(error: Exception, process_set) -> None:
    """Tells the other ranks, which are in `introduce` or will be, that this one fails. Collective."""
    _meet({"error": str(error)}, process_set)


def _meet(mine: dict[str, Any], process_set) -> list[dict[str, Any]]:
    """Every rank's message, once it is known that all ranks are there to send one."""
    places = torch.zeros(comm.rank_and_size(process_set)[1], dtype=torch.int64)
    places[comm.rank_and_size(process_set)[0]] = 1
    comm.wait(comm.start_sum(places, f"{_NAME}.present", process_set))
    for rank, present in enumerate(places.tolist()):
        if not present:
            raise LockstepError(f"rank {rank} takes no part in this step: {JOINED}")
    return comm.gather_json(mine, _NAME, process_set)


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """The first thing in which a rank differs from rank 0, in words; "" if there is none."""
    for key in sorted({*first["settings"], *other["settings"]}):
        values = first["settings"].get(key), other["settings"].get(key)
        if values[0] != values[1]:
            return f"rank 0 has {key} {values[0]}, rank {rank} has {values[1]}{_HINTS.get(key, '')}"
    if first["parameters"] == other["parameters"]:
        return ""
    shapes, others = dict(first["parameters"]), dict(other["parameters"])
    for name in sorted({*shapes, *others}):
        if shapes.get(name) != others.get(name):
            return f"parameter {name} has shape {_shape(shapes, name)} on rank 0, {_shape(others, name)} on rank {rank}"
    return f"rank 0 and rank {rank} have the same parameters in another order"


def _shape(shapes: dict[str, list[int]], name: str) -> str:
    return str(tuple(shapes[name])) if name in shapes else "none (there is no such parameter)"
