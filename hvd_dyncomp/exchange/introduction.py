"""When ranks have found that they disagree: each tells the others all about itself, and all say the same, in words.

The sentence "rank 1 has composition 2716351218" helps nobody.
"""

from __future__ import annotations

from typing import Any

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.transport.base import Transport, finish_gather_json, start_gather_json

_HINTS = {
    "step": " (was its state loaded on every rank? elastic training: give it to hvd.elastic.TorchState)",
    "bits": " (have the controllers seen the same epochs? elastic training: give it to hvd.elastic.TorchState)",
}


class Introduction:
    """What the ranks of a group are about to do, compared. To be made on all of them, or on none; does not block.

    Args:
        transport: the group.
        name: what this optimizer's collectives begin with.
        mine: {"settings": plain data by the names that error messages use,
        "parameters": [name, shape, whether it is compressed] of everything that is reduced, in order}; or
        {"error": why this rank cannot take part}.
    """

    def __init__(self, transport: Transport, name: str, mine: dict[str, Any]) -> None:
        self._transport = transport
        self._handle = start_gather_json(transport, mine, f"{name}.introduction")

    @property
    def heard(self) -> bool:
        """Whether `finish` would not block."""
        return self._transport.poll(self._handle)

    def finish(self) -> None:
        """Blocks until all have been heard.

        Raises:
            LockstepError: always, as somebody differs; the text says who, and in what.
        """
        everyone = finish_gather_json(self._transport, self._handle)
        for rank, theirs in enumerate(everyone):
            if "error" in theirs:
                raise LockstepError(f"rank {rank} cannot use its DynamicQuantizer: {theirs['error']}")
        for rank, theirs in enumerate(everyone):
            difference = _difference(everyone[0], theirs, rank)
            if difference:
                raise LockstepError(f"the ranks' DynamicQuantizers do not fit together: {difference}")
        raise LockstepError("the ranks' DynamicQuantizers do not fit together, and cannot say why")


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int) -> str:
    """The first thing in which a rank differs from rank 0, in words; "" if there is none."""
    for key in sorted({*first["settings"], *other["settings"]}):
        values = first["settings"].get(key), other["settings"].get(key)
        if values[0] != values[1]:
            return f"rank 0 has {key} {values[0]}, rank {rank} has {values[1]}{_HINTS.get(key, '')}"
    if first["parameters"] == other["parameters"]:
        return ""
    ours, theirs = ({name: rest for name, *rest in one["parameters"]} for one in (first, other))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"parameter {name} has shape {_words(ours, name)} on rank 0, {_words(theirs, name)} on rank {rank}"
    return f"rank 0 and rank {rank} have the same parameters in another order"


def _words(parameters: dict[str, Any], name: str) -> str:
    if name not in parameters:
        return "none (there is no such parameter)"
    shape, compressed = parameters[name]
    return f"{tuple(shape)}{'' if compressed else ' (not compressed)'}"
