"""What a child that this process forks must not keep: the descriptors of connections.

A connection ends for the other rank when no process holds it any more. The workers of a `DataLoader` would hold all of
their rank's, and the other ranks would not notice that it was killed until its workers have ended, too.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol, TypeVar


class Closes(Protocol):
    """A socket or a selector."""

    def close(self) -> None:
        """Close this process's descriptor. The parent's stays open."""


One = TypeVar("One", bound=Closes)

_open: weakref.WeakSet[Closes] = weakref.WeakSet()


def not_for_children(one: One) -> One:
    """Have a socket or selector closed in children. Call it where one is made; returns it."""
    _open.add(one)
    return one


def _close_all() -> None:
    for one in list(_open):
        with contextlib.suppress(OSError):
            one.close()


os.register_at_fork(after_in_child=_close_all)
