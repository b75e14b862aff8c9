"""What a controller knows of its quantizers, and the lookout: other ranks may train while one is in `Controller.step`.

`if hvd.rank() == 0: controller.step(...)` would make rank 0 wait for the others' metrics, and the others for its
handshake, for ever. So a rank that has waited in `Controller.step` for a while shakes hands as well, with a flag, for
every optimizer that the controller's quantizers work for. A rank that trains sees the flag. A rank that only came late
shakes hands, too.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch

from hvd_dyncomp.exchange.handshake import handshake
from hvd_dyncomp.exchange.task import Task
from hvd_dyncomp.exchange.wire import WIRE_VERSION, Flag, Greeting, Phase
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.transport.base import Transport

_PATIENCE_SECONDS = 1.0
_LOOK_SECONDS = 1e-3  # between two looks at the others' hands


class Labelled(Protocol):
    """Something that has an optimizer, or will have one: a `Lifecycle`."""

    @property
    def label(self) -> str | None:
        """Part of the names of its collectives; None if it has none among all ranks, or none yet."""

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that its optimizer, or its model, trains now."""


# By controller; in order, by a number that counts up.
_lifecycles: weakref.WeakKeyDictionary[object, weakref.WeakValueDictionary[int, Labelled]]
_lifecycles = weakref.WeakKeyDictionary()
_number = itertools.count()


def register(controller: object, lifecycle: Labelled) -> None:
    """Register a quantizer's lifecycle under the controller that gives its level."""
    _lifecycles.setdefault(controller, weakref.WeakValueDictionary())[next(_number)] = lifecycle


def registered(controller: object) -> dict[str, Labelled]:
    """By label. Of several with the same label, the last: the others wait to be deleted, on some ranks longer."""
    known = list(_lifecycles.get(controller, {}).values())
    return {one.label: one for one in known if one.label is not None}


class Lookout:
    """The lookout of one call of `Controller.step`.

    Args:
        controller: the controller.
        transport: the controller's.

    Attributes:
        labels: of the optimizers for which this rank shakes hands, sorted.
    """

    def __init__(self, controller: object, transport: Transport) -> None:
        self._transport = transport
        self._known = set(registered(controller))
        self._handshakes: dict[str, Task] = {}

    @property
    def labels(self) -> list[str]:
        """See the class."""
        return sorted(self._handshakes)

    def wait(self, handle: Any) -> None:
        """Wait for the first collective of `Controller.step`.

        Raises:
            LockstepError: another rank trains. That rank raises it, too.
        """
        if self._transport.wait_for(handle, _PATIENCE_SECONDS):
            return
        self._shake(self._known)
        while not self._transport.wait_for(handle, _LOOK_SECONDS):
            for task in self._handshakes.values():
                if task.advance():
                    task.outcome()

    def end(self, labels: Iterable[str]) -> None:
        """When all ranks are in `Controller.step`: complete the handshakes that any rank has begun. Collective.

        Args:
            labels: of all ranks.
        """
        self._shake(labels)
        for label in self.labels:
            self._handshakes[label].outcome()

    def _shake(self, labels: Iterable[str]) -> None:
        for label in sorted(set(labels) - set(self._handshakes)):
            greeting = Greeting(WIRE_VERSION, Phase.HANDSHAKE, UNCOMPRESSED, 0, 0, 0, Flag.CONTROLLER, 0, 0)
            self._handshakes[label] = Task(self._transport, handshake(self._transport, label, greeting, dict))
            self._handshakes[label].begin()
