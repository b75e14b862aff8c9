"""The sockets of process groups: no child of this process keeps them, and a rank that has given up shuts them.

A connection ends for the other rank when no process holds it any more. The workers of a `DataLoader` would hold all of
their rank's, and the other ranks would not notice that it was killed until its workers have ended, too. Gloo has no
other way to tell the other ranks (its `abort` does nothing). torch does not tell which sockets a process group has:
those that appear while it is made.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

_HERE = Path("/proc/self/fd")  # Linux

Sockets = set[tuple[int, int]]  # descriptor, and number of what it stands for: descriptors are used again

_ours: Sockets = set()


def _sockets() -> Sockets:
    found = set()
    for entry in _HERE.iterdir() if _HERE.exists() else ():
        with contextlib.suppress(OSError):  # that of the folder itself
            about = os.fstat(int(entry.name))
            if stat.S_ISSOCK(about.st_mode):
                found.add((int(entry.name), about.st_ino))
    return found


@contextlib.contextmanager
def new_sockets_not_for_children() -> Iterator[Sockets]:
    """Have the sockets that appear in this context closed in children, forked ones and other programs.

    Yields a set that has them afterwards.
    """
    before, made = _sockets(), set[tuple[int, int]]()
    yield made
    made |= _sockets() - before
    for number, _ in made:
        os.set_inheritable(number, False)
    _ours.intersection_update(before)  # what has been closed since
    _ours.update(made)


def shut(sockets: Sockets) -> None:
    """End connections, but leave their descriptors to whoever has them. Both ends notice."""
    for number in _open(sockets):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as one:
            one.getpeername()  # one that listens has none, and Gloo would end the process
            one.shutdown(socket.SHUT_RDWR)


def _open(sockets: Sockets) -> Iterator[int]:
    """The descriptors of those that are still open."""
    for number, inode in sockets:
        with contextlib.suppress(OSError):
            if os.fstat(number).st_ino == inode:
                yield number


def _close_ours() -> None:
    for number in _open(_ours):
        os.close(number)
    _ours.clear()


os.register_at_fork(after_in_child=_close_ours)
