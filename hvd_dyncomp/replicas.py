"""The check that all ranks hold the same parameters, bit for bit: what parts them is often a mistake that nobody sees.

`Controller.step` gathers one number for each model (`brief`), and only if those differ, one for each parameter
(`compare`). A number is `zlib.crc32` of the parameter's bytes in logical order: 46 ms for 25.6 million float32 values.
The bits of NaNs count as well: all ranks decode the same bytes, Gloo and MPI give all ranks the same sum, and equal
hosts make the same bits of them.
Which models a controller compares, its quantizers say (`register`).
"""

from __future__ import annotations

import itertools
import json
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.transport.base import Transport, gather_json

Named = Sequence[tuple[str, torch.Tensor]]  # (name, parameter) pairs
Models = Callable[[], Mapping[str, Named]]  # by label

_PART = 2**23  # values that are copied at a time, of a GPU
_CAUSES = (
    "Usual causes: gradients were not exchanged (every forward pass ran in no_sync; or, after the model was wrapped, a "
    "module was unfrozen or added, or load_state_dict(assign=True) was called); the optimizer stepped before gradients "
    "were averaged (LBFGS, hooks that step); the ranks started with different parameters. If the ranks are meant to "
    "differ, pass Controller(..., check_replicas=False)"
)


class Trained(Protocol):
    """Something that trains a model on all ranks, or will.

    Attributes:
        meter: a `Meter` of its steps.
    """

    meter: Any

    @property
    def label(self) -> str | None:
        """A name of the model, the same on all ranks; None if it does not train among all ranks, or not yet."""

    def trained(self) -> Named:
        """(name, parameter) of all that is trained now."""


# By controller; in order, by a number that counts up.
_trainers: weakref.WeakKeyDictionary[object, weakref.WeakValueDictionary[int, Trained]] = weakref.WeakKeyDictionary()
_count = itertools.count()


def register(controller: object, trainer: Trained) -> None:
    """Have a controller compare what a trainer trains, as long as both exist."""
    _trainers.setdefault(controller, weakref.WeakValueDictionary())[next(_count)] = trainer


def idle(controller: object, epoch: int) -> bool:
    """Whether a controller has trainers, and none of them has had a step in an epoch."""
    trainers = list(_trainers.get(controller, {}).values())
    return bool(trainers) and not any(each.meter.epoch(epoch).steps for each in trainers)


def models_of(controller: object) -> dict[str, Named]:
    """What is trained at a controller's level now, by label. Models that are deleted are left out.

    Several trainers may have one label. Of those with the same parameters the last counts: the others wait to be
    deleted, on some ranks longer. So of those with other parameters the last is the first.
    """
    models: dict[str, Named] = {}
    numbers: dict[str, int] = {}
    seen: set[torch.Tensor] = set()
    for each in reversed(list(_trainers.get(controller, {}).values())):
        label = each.label
        named = each.trained() if label is not None else ()
        if label is not None and not seen.issuperset(parameter for _, parameter in named):
            numbers[label] = number = numbers.get(label, 0) + 1
            models[label if number == 1 else f"{label} ({number})"] = named
            seen.update(parameter for _, parameter in named)
    return models


def brief(models: Models) -> dict[str, int] | None:
    """One number for the parameters of each model, by label; None if they cannot be read. Never raises."""
    try:
        return {label: _crc32(json.dumps(numbers(named))) for label, named in models().items()}
    except Exception:  # noqa: BLE001  # the other ranks wait; `compare` says why
        return None


def alike(everyone: Sequence[Mapping[str, Any] | None]) -> bool:
    """Whether models of several ranks are the same, by what `brief` returned on each rank."""
    return not any(_differing([each or {} for each in everyone])) and None not in everyone


def compare(transport: Transport, models: Models, name: str) -> None:
    """Compare each parameter of the models that several ranks have. Collective.

    Args:
        transport: connects the ranks.
        models: this rank's.
        name: of the collective.

    Raises:
        LockstepError: on every rank: a parameter differs, or a rank cannot read its parameters.
    """
    mine: dict[str, Any]
    try:
        mine = {"models": {label: numbers(named) for label, named in models().items()}}
    except Exception as error:  # noqa: BLE001  # the other ranks wait
        mine = {"error": f"{type(error).__name__}: {error}"}
    everyone = gather_json(transport, mine, name)
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            raise LockstepError(f"rank {rank} cannot compare its parameters: {theirs['error']}")
    for label, *ranks in _differing([theirs["models"] for theirs in everyone]):
        one, other = (everyone[rank]["models"][label] for rank in ranks)
        names = [each for each in {**one, **other} if one.get(each) != other.get(each)]
        lacks = [
            f" (rank {rank} has no such parameter)" for rank in ranks if names[0] not in everyone[rank]["models"][label]
        ]
        raise LockstepError(
            f"parameter {names[0]} is not the same on rank {ranks[0]} and rank {ranks[1]}{''.join(lacks)}; "
            f"{len(names)} of {len({**one, **other})} parameters differ. {_CAUSES}"
        )


def _differing(everyone: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, int, int]]:
    """Label, first rank that has it, and a rank whose value is another one."""
    first: dict[str, int] = {}
    for rank, values in enumerate(everyone):
        for label, value in values.items():
            before = first.setdefault(label, rank)
            if everyone[before][label] != value:
                yield label, before, rank


def numbers(named: Named) -> dict[str, int]:
    """A checksum of each parameter."""
    return {name: _number(parameter) for name, parameter in named}


def _crc32(text: str) -> int:
    return zlib.crc32(text.encode())


@torch.inference_mode(False)  # in which nobody may look at a DTensor's part
@torch.no_grad()
def _number(values: torch.Tensor) -> int:
    """A checksum of shape, dtype and all bits of the values."""
    if is_lazy(values) or values.is_meta:  # has no values yet
        return 0
    values = values.detach()
    number = _crc32(f"{tuple(values.shape)} {values.dtype}")
    if hasattr(values, "to_local"):  # a DTensor: this rank's part
        values = values.to_local()
    if values.layout is not torch.strided:
        values = values.to_dense()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    for part in values.reshape(-1).split(_PART):
        number = zlib.crc32(part.cpu().view(torch.uint8).numpy(), number)
    return number
