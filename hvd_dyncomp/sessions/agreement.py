"""All ranks compress the same model, or make an `Averager` of the same parameters, or none of them does."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from hvd_dyncomp import replicas
from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.exchange.wire import checksum
from hvd_dyncomp.transport.base import Transport, gather_json, gather_or_raise


class Call(NamedTuple):
    """What the ranks do together, for messages and in the names of collectives.

    Attributes:
        name: of the call.
        fails: what a rank with an error cannot do.
        differs: what the ranks do if they differ in what is compared.
        remedy: what to do then.
    """

    name: str
    fails: str
    differs: str = ""
    remedy: str = ""


COMPRESS = Call(
    "compress",
    "cannot compress its model",
    "compress different models",
    "compress models in the same order on every rank (iterate over a list, not over a set), and load checkpoints on "
    "every rank, or before DistributedDataParallel(...), which broadcasts the values of rank 0",
)
STATES = Call("per_rank", "cannot save or load its state")
AVERAGER = Call(
    "averager",
    "cannot make its Averager",
    "make different Averagers",
    "create Averagers in the same order on every rank (iterate over a list, not over a set), for parameters with the "
    "same values; if the values are meant to differ between ranks, pass Controller(..., check_replicas=False)",
)

ATTACH = Call(
    "attach",
    "cannot attach its quantizer",
    "attach to different optimizers",
    "call attach for the same optimizers in the same order on every rank",
)


def description(named: replicas.Named, *, values: bool = True) -> list[Any]:
    """[name, shape, dtype, a checksum of the values, or 0 without `values`] of each parameter: plain data."""
    numbers = replicas.numbers(named) if values else {}
    return [[name, list(one.shape), str(one.dtype), numbers.get(name, 0)] for name, one in named]


@contextlib.contextmanager
def on_all_ranks(transport: Transport, call: Call = COMPRESS) -> Iterator[list[Any]]:
    """Whatever a rank raises in this context ends it on all ranks, and so does another model. Collective; blocks.

        with on_all_ranks(transport) as mine:
            ...
            mine += description(named)

    Models are matched by the order of calls, so ranks may have different ones in hand, of the same names and shapes.

    Args:
        call: what the ranks do.

    Yields:
        A list for the `description` of this rank's model, which is compared with the others'.

    Raises:
        LockstepError: another rank has an error, or another model. On all ranks that have no error of their own.
    """
    mine: list[Any] = []
    error: Exception | None = None
    try:
        yield mine
    except Exception as own:  # noqa: BLE001  # raised when the other ranks have heard of it
        error = own
    models = gather_or_raise(transport, checksum(json.dumps(mine)), error, f"hvd_dyncomp.{call.name}", call.fails)
    if len(set(models)) > 1:
        everyone = gather_json(transport, mine, f"hvd_dyncomp.{call.name}.models")
        rank = next(rank for rank, theirs in enumerate(everyone) if theirs != everyone[0])
        raise LockstepError(
            f"the ranks {call.differs}: {_difference(everyone[0], everyone[rank], rank)}; {call.remedy}"
        )


def _difference(ours: list[Any], theirs: list[Any], rank: int) -> str:
    """The first difference between rank 0's model and that of another rank, in words."""
    number = next((i for i, (one, other) in enumerate(zip(ours, theirs, strict=False)) if one != other), None)
    if number is None:
        return f"{len(ours)} parameters on rank 0, {len(theirs)} on rank {rank}"
    (name, *kind, _), (other, *others, _) = ours[number], theirs[number]
    if (name, kind) == (other, others):
        return f"parameter {name} has different values on rank 0 and on rank {rank}"
    one, two = (f"{name} ({dtype}, shape {shape})" for name, shape, dtype, _ in (ours[number], theirs[number]))
    return f"parameter number {number} is {one} on rank 0, but {two} on rank {rank}"
