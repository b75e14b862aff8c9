"""The handshake: once per step, all ranks check that they do the same before they send what fits only then."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvd_dyncomp import replicas
from hvd_dyncomp.errors import JOINED, LockstepError
from hvd_dyncomp.exchange.task import Collectives, Task
from hvd_dyncomp.exchange.wire import GREETING_BYTES, WIRE_VERSION, Greeting
from hvd_dyncomp.transport.base import Transport, gathered_json, start_gather_json


def handshake(
    transport: Transport, label: str, greeting: Greeting, about: Callable[[], dict[str, Any]]
) -> Collectives[None]:
    """Send a greeting of a few bytes from every rank to every rank. If they differ, the ranks exchange all settings.

    It is the same collective whatever the ranks disagree about: else a rank at 4 bits would wait for ever for the
    scatter of a rank at 32. It is an allreduce, a sum to which every rank adds zeros for the others: the only
    collective that Horovod completes after a rank has called `hvd.join()`. The place of that rank stays zero.

    Args:
        transport: connects the ranks of the optimizer.
        label: the optimizer's, in the names of collectives.
        greeting: this rank's.
        about: returns all that the ranks must agree on, in words; called if the greetings differ. {"settings": plain
            data by the names that error messages use, "parameters": [name, shape, dtype, whether it is compressed] of
            everything that is reduced, in order, "values": as `replicas.difference` takes them}; or {"error": why this
            rank cannot take part}.

    Raises:
        LockstepError: a rank differs, or cannot take part; the message names the rank, and says how or why.
    """
    name = f"hvd_dyncomp.{label}"
    with torch.inference_mode(False):  # a thread in another mode may write the sum
        places = torch.zeros(transport.size, GREETING_BYTES, dtype=torch.uint8, device="cpu")
        places[transport.rank] = torch.frombuffer(bytearray(greeting.to_bytes()), dtype=torch.uint8)
        numbers = places.view(torch.int64)
    yield transport.sum(numbers, f"{name}.handshake")
    greetings = _greetings(places, name)
    if _agree(greetings):
        return
    received = yield start_gather_json(transport, about(), f"{name}.introduction")
    raise LockstepError(_disagreement(gathered_json(received), transport.elastic))


@torch.inference_mode(False)  # inference mode may be the error
def refuse(transport: Transport, label: str, error: Exception, *, number: int, bits: float) -> None:
    """Tell the other ranks why this one does not take part in a step. Blocks until they have begun it, too.

    Args:
        transport, label: as in `Source`.
        number, bits: as in `Step`.
    """
    greeting = Greeting(WIRE_VERSION, 1, bits, composition=0, step=number & 0xFFFFFFFF, values=0)
    about = {"error": str(error)}
    with contextlib.suppress(Exception):  # what the others raise; or they are gone, and need not hear of it
        Task(transport, handshake(transport, label, greeting, lambda: about)).outcome()


def _greetings(places: torch.Tensor, name: str) -> list[Greeting]:
    messages = [place.numpy().tobytes() for place in places]
    for rank, message in enumerate(messages):
        if not any(message):
            raise LockstepError(f"{name}: rank {rank} is missing from this step: {JOINED}")
    return [Greeting.from_bytes(message) for message in messages]


def _agree(greetings: Sequence[Greeting]) -> bool:
    values = {greeting.values for greeting in greetings} - {0}  # of the ranks that compare them
    rest = {greeting._replace(values=0) for greeting in greetings}
    return len(values) <= 1 and len(rest) == 1 and not greetings[0].failed


_HINTS = {
    "attached": "has attach(optimizer) been called on some ranks only, or a new quantizer been made?",
    "step": "was the quantizer's state loaded on every rank?",
    "bits": "have all controllers seen the same epochs?",
    "tensors that are None": "give zeros where only some ranks have a tensor",
    "module": "do all replicas go through the same modules, in the same order?",
    "values of": "FSDP broadcasts nothing: load the same checkpoint on all replicas, or use the same seed",
}


def _disagreement(everyone: list[dict[str, Any]], elastic: str) -> str:
    """What differs between the ranks, in words: "rank 1 has composition 2716351218" would help nobody."""
    for rank, theirs in enumerate(everyone):
        if "error" in theirs:
            return f"rank {rank} cannot use its quantizer: {theirs['error']}"
    for rank, theirs in enumerate(everyone):
        difference = _difference(everyone[0], theirs, rank, elastic)
        if difference:
            return f"the ranks' quantizers differ: {difference}"
    return replicas.difference([theirs["values"] for theirs in everyone]) or (
        "the ranks' quantizers differ, but no difference was found; please report this as a bug of hvd_dyncomp"
    )


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int, elastic: str) -> str:
    """The first difference between a rank and rank 0, in words; "" if there is none."""
    for key in sorted({*first["settings"], *other["settings"]}):
        values = first["settings"].get(key), other["settings"].get(key)
        if values[0] != values[1]:
            loads = elastic and key in ("attached", "step", "bits")
            advice = f" elastic training: pass quantizer and controller to {elastic}" if loads else ""
            words = next((text for start, text in _HINTS.items() if key.startswith(start)), "")
            hint = f" ({words}{advice})" if words else ""
            return f"rank 0 has {key} {values[0]}, rank {rank} has {values[1]}{hint}"
    if first["parameters"] == other["parameters"]:
        return ""
    ours, theirs = ({name: rest for name, *rest in one["parameters"]} for one in (first, other))
    for name in sorted({*ours, *theirs}):
        if ours.get(name) != theirs.get(name):
            return f"parameter {name} is {_words(ours, name)} on rank 0, {_words(theirs, name)} on rank {rank}"
    return f"rank 0 and rank {rank} have the same parameters in another order"


def _words(parameters: dict[str, Any], name: str) -> str:
    if name not in parameters:
        return "not there"
    shape, dtype, compressed = parameters[name]
    return f"{dtype.removeprefix('torch.')} {tuple(shape)}{'' if compressed else ' (not compressed)'}"
