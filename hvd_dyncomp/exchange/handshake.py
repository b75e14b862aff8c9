"""The handshake: once per step, all ranks check that they do the same before they send what fits only then."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch

from hvd_dyncomp.errors import JOINED, LockstepError
from hvd_dyncomp.exchange.wire import GREETING_BYTES, Flag, Greeting
from hvd_dyncomp.transport.base import Transport, finish_gather_json, start_gather_json


class Handshake:
    """A greeting of a few bytes from every rank to every rank. If they differ, the ranks exchange all settings.

    `start` sends it with the first gradient. It is the same collective whatever the ranks disagree about: else a rank
    at 4 bits would wait for ever for the scatter of a rank at 32. It is an allreduce, a sum to which every rank adds
    zeros for the others: the only collective that Horovod completes after a rank has called `hvd.join()`. The place of
    that rank stays zero.

    Args:
        transport: connects the ranks of the optimizer.
        label: the optimizer's, in the names of collectives.
        greeting: this rank's.
        about: returns all that the ranks must agree on, in words (`Introduction`); called if the greetings differ.

    Attributes:
        known: whether all greetings have arrived, or never will.
    """

    def __init__(
        self, transport: Transport, label: str, greeting: Greeting, about: Callable[[], dict[str, Any]]
    ) -> None:
        self._transport, self._mine, self._about = transport, greeting, about
        self._name = f"hvd_dyncomp.{label}"
        self._places = torch.zeros(transport.size, GREETING_BYTES, dtype=torch.uint8, device="cpu")
        self._places[transport.rank] = torch.frombuffer(bytearray(greeting.to_bytes()), dtype=torch.uint8)
        self._handle: Any = None
        self._flags = Flag(0)
        self._greetings: list[Greeting] = []
        self._introduction: Introduction | None = None
        self._error: Exception | None = None

    @property
    def fresh(self) -> bool:
        """Whether backward has run on any rank; False until that is known."""
        return bool(self._flags & Flag.FRESH)

    @property
    def nbytes(self) -> int:
        """Bytes that it reduces."""
        return self._places.numel()

    @property
    def greetings(self) -> list[Greeting]:
        """The greetings in rank order; empty until they are known."""
        return self._greetings

    @property
    def known(self) -> bool:
        """See the class."""
        return bool(self._greetings) or self._error is not None

    @property
    def started(self) -> bool:
        """Whether this rank's greeting has gone out."""
        return self._handle is not None

    def start(self) -> None:
        """Send the greeting. Call it once."""
        self._handle = self._transport.sum(self._places.view(torch.int64), f"{self._name}.handshake")

    @property
    def ready(self) -> bool:
        """Whether greetings have arrived that are not read yet."""
        return self.started and not self.known and self._transport.poll(self._handle)

    @property
    def drained(self) -> bool:
        """Whether nothing of it is in flight. Does not block."""
        return self.known and (self._introduction is None or self._error is not None or self._introduction.heard)

    def agreed(self) -> bool:
        """Whether all ranks are known to do the same. Neither blocks nor raises."""
        if self.ready:
            self._receive()
        return bool(self._greetings) and self._introduction is None and self._error is None

    def check(self) -> list[Greeting]:
        """Wait for all ranks' greetings; return them in rank order. Blocks: never call it within backward.

        Raises:
            LockstepError: a rank differs; the message names the rank and what differs.
        """
        if not self.known:
            self._receive()
        if self._error is None and self._introduction is not None:
            try:
                self._introduction.finish()
            except Exception as error:  # noqa: BLE001  # raised again each time that somebody asks
                self._error = error
        if self._error is not None:
            raise self._error
        return self._greetings

    def _receive(self) -> None:
        """Wait for the greetings. If they differ, start the introduction: all ranks draw the same conclusion."""
        try:
            self._transport.wait(self._handle)
            messages = [place.numpy().tobytes() for place in self._places]
            for rank, message in enumerate(messages):
                if not any(message):
                    raise LockstepError(f"{self._name}: rank {rank} is missing from this step: {JOINED}")
            greetings = [Greeting.from_bytes(message) for message in messages]
            _check_controller(greetings, self._transport.rank_call)
            self._greetings = greetings
            first = _comparable(self._greetings[0])
            self._flags = Flag(functools.reduce(operator.or_, (greeting.flags for greeting in self._greetings)))
            if self._flags & Flag.FAILED or any(_comparable(greeting) != first for greeting in self._greetings):
                self._introduction = Introduction(self._transport, self._name, self._about())
        except Exception as error:  # noqa: BLE001  # raised by check()
            self._error = error


def _check_controller(greetings: list[Greeting], rank_call: str) -> None:
    """Check that all ranks are in `Controller.step`, or none.

    Raises:
        LockstepError: only some are.
    """
    inside = [bool(greeting.flags & Flag.CONTROLLER) for greeting in greetings]
    if any(inside) and not all(inside):
        raise LockstepError(
            f"rank {inside.index(True)} is in Controller.step, and rank {inside.index(False)} goes on training: every "
            "rank must call controller.step(...) after each epoch, with num_samples=0 if it does not validate; use "
            f"`if {rank_call} == 0:` only for code that prints or saves"
        )


def _comparable(greeting: Greeting) -> Greeting:
    return greeting._replace(proposal=0, flags=0, host=0, topology=0)


# When ranks disagree, each sends the others all its settings, and all raise the same error in words: "rank 1 has
# composition 2716351218" would help nobody.

_HINTS = {
    "step": "was the quantizer's state loaded on every rank?",
    "bits": "have all controllers seen the same epochs?",
}


class Introduction:
    """All settings of all ranks, compared after greetings differed. Made on every rank or on none; does not block.

    Args:
        transport: the group.
        name: prefix of this optimizer's collectives.
        mine: {"settings": plain data by the names that error messages use, "parameters": [name, shape, whether it is
            compressed] of everything that is reduced, in order}; or {"error": why this rank cannot take part}.
    """

    def __init__(self, transport: Transport, name: str, mine: dict[str, Any]) -> None:
        self._transport = transport
        self._handle = start_gather_json(transport, mine, f"{name}.introduction")

    @property
    def heard(self) -> bool:
        """Whether `finish` would not block."""
        return self._transport.poll(self._handle)

    def finish(self) -> None:
        """Block until all ranks have answered.

        Raises:
            LockstepError: always, since some rank differs; the message names the rank and what differs.
        """
        everyone = finish_gather_json(self._transport, self._handle)
        for rank, theirs in enumerate(everyone):
            if "error" in theirs:
                raise LockstepError(f"rank {rank} cannot use its DynamicQuantizer: {theirs['error']}")
        for rank, theirs in enumerate(everyone):
            difference = _difference(everyone[0], theirs, rank, self._transport.elastic)
            if difference:
                raise LockstepError(f"the ranks' DynamicQuantizers differ: {difference}")
        raise LockstepError("the ranks' DynamicQuantizers differ, but no difference was found")


def _difference(first: dict[str, Any], other: dict[str, Any], rank: int, elastic: str) -> str:
    """The first difference between a rank and rank 0, in words; "" if there is none."""
    for key in sorted({*first["settings"], *other["settings"]}):
        values = first["settings"].get(key), other["settings"].get(key)
        if values[0] != values[1]:
            advice = f" elastic training: pass quantizer and controller to {elastic}" if elastic else ""
            hint = f" ({_HINTS[key]}{advice})" if key in _HINTS else ""
            return f"rank 0 has {key} {values[0]}, rank {rank} has {values[1]}{hint}"
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
