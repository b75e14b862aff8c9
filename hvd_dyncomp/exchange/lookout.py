"""Notice that other ranks train while this one is in `Controller.step`.

`if hvd.rank() == 0: controller.step(...)` would make rank 0 wait for the others' metrics, and the others for its
handshake, for ever. So a rank that has waited in `Controller.step` for a while shakes hands as well, with a flag, for
every optimizer that the controller's quantizers work for. A rank that trains sees the flag. A rank that only came late
shakes hands, too.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from hvd_dyncomp.exchange.handshake import Handshake
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


_lifecycles: weakref.WeakKeyDictionary[object, weakref.WeakSet[Labelled]] = weakref.WeakKeyDictionary()


def register(controller: object, lifecycle: Labelled) -> None:
    """Register a quantizer's lifecycle under the controller that gives its level."""
    _lifecycles.setdefault(controller, weakref.WeakSet()).add(lifecycle)


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
        self._known = {one.label for one in _lifecycles.get(controller, ()) if one.label is not None}
        self._handshakes: dict[str, Handshake] = {}

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
            for handshake in self._handshakes.values():
                handshake.agreed()
                if handshake.known:
                    handshake.check()

    def end(self, labels: Iterable[str]) -> None:
        """When all ranks are in `Controller.step`: complete the handshakes that any rank has begun. Collective.

        Args:
            labels: of all ranks.
        """
        self._shake(labels)
        for label in self.labels:
            self._handshakes[label].check()

    def _shake(self, labels: Iterable[str]) -> None:
        for label in sorted(set(labels) - set(self._handshakes)):
            greeting = Greeting(WIRE_VERSION, Phase.HANDSHAKE, UNCOMPRESSED, 0, 0, 0, Flag.CONTROLLER, 0, 0)
            self._handshakes[label] = handshake = Handshake(self._transport, label, greeting, dict)
            handshake.start()
