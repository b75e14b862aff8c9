"""What is done beside the program, for as long as whoever wants it done is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable

from hvd_dyncomp.transport.base import Transport


def in_background(transport: Transport, work: Callable[[], bool]) -> None:
    """As the transport's, for a method: until it returns True, or its object is no more."""
    this = weakref.WeakMethod(work)

    def alive() -> bool:
        method = this()
        return method is None or method()

    transport.in_background(alive)
