"""The sockets of process groups: no child of this process keeps them, and a rank that has given up shuts them.

A connection ends for the other rank when no process holds it any more. The workers of a `DataLoader` would hold all of
their rank's, and the other ranks would not notice that it was killed until its workers have ended, too. Gloo has no
other way to tell the other ranks (its `abort` does nothing). torch does not tell which sockets a process group has.
They appear while it is made, as may those of the program's other threads. Those of a group connect two of its ranks.
"""

from __future__ import annotations

import contextlib
import hashlib
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
def new_sockets() -> Iterator[Sockets]:
    """Yields a set that afterwards has the sockets that have appeared in this context, in whatever thread."""
    before, made = _sockets(), set[tuple[int, int]]()
    yield made
    made |= _sockets() - before


def connections(sockets: Sockets) -> dict[str, tuple[int, int]]:
    """The connections among sockets, by a word that is the same at both ends."""
    found = {}
    for one in sockets:
        own, peer = _addresses(one)
        if own and peer:
            found[hashlib.blake2b(repr(sorted((own, peer))).encode(), digest_size=8).hexdigest()] = one
    return found


def that_belong_to(kept: Sockets, sockets: Sockets) -> Sockets:
    """Connections, and those of `sockets` that listen where these have come in."""
    places = {_addresses(one)[0] for one in kept}
    return kept | {one for one in sockets if _addresses(one)[0] in places and not _addresses(one)[1]}


def _addresses(one: tuple[int, int]) -> tuple[str, str]:
    """A socket's own address and that of its peer, as both ends see them; "" for what it has not."""
    found = ["", ""]
    for number in _open({one}):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as opened:
            if opened.family in (socket.AF_INET, socket.AF_INET6):
                for place, ask in enumerate((opened.getsockname, opened.getpeername)):
                    host, port, *_ = ask()
                    found[place] = f"{host.partition('%')[0].removeprefix('::ffff:')} {port}"
    return found[0], found[1]


def keep_from_children(sockets: Sockets) -> None:
    """Have sockets closed in children, forked ones and other programs."""
    for number in _open(sockets):
        os.set_inheritable(number, False)
    _ours.intersection_update(_sockets())  # others have been closed since
    _ours.update(sockets)


def any_closed(sockets: Sockets) -> bool:
    """Whether any is no longer open: Gloo closes one when it notices that the other end is gone."""
    return len(list(_open(sockets))) < len(sockets)


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
