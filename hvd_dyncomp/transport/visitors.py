"""Connections that come in: ranks are let in by the group's secret, whatever strangers say or do not say."""

from __future__ import annotations

import errno
import secrets
import selectors
import socket
import struct
import time
from collections.abc import Iterable

from hvd_dyncomp.transport.forked import not_for_children

HELLO = struct.Struct("<32sI")  # the group's secret, rank
HELLO_SECONDS = 5.0  # for a visitor to say who it is
_MOST_VISITORS = 64  # at a time, besides the expected ranks


class Visitors:
    """Those who have connected and not yet said who they are.

    Args:
        listeners: sockets that listen.
        secret: 32 bytes.
        expected: the ranks that will connect.

    Attributes:
        missing: those that have not yet.
        found: connections of those that have, by rank. Whoever made this object closes them.
    """

    def __init__(self, listeners: Iterable[socket.socket], secret: bytes, expected: Iterable[int]) -> None:
        self._secret, self.missing = secret, set(expected)
        self.found: dict[int, socket.socket] = {}
        self._most = _MOST_VISITORS + len(self.missing)
        self._said: dict[socket.socket, tuple[bytes, float]] = {}  # with the time limit of each; the oldest first
        self._selector = not_for_children(selectors.DefaultSelector())
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ)

    def receive(self, until: float) -> None:
        """Block until all expected ranks have connected.

        Raises:
            TimeoutError: some have not.
        """
        while self.missing:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"ranks {sorted(self.missing)} have not connected")
            for key, _ in self._selector.select(min(left, HELLO_SECONDS / 5)):
                if key.fileobj in self._said:
                    self._listen_to(key.fileobj)  # type: ignore[arg-type]
                else:
                    self._admit(key.fileobj)  # type: ignore[arg-type]
            for visitor, (_, limit) in list(self._said.items()):
                if limit < time.monotonic() or len(self._said) > self._most:
                    self._send_away(visitor)

    def close(self) -> None:
        """Send all visitors away."""
        for visitor in list(self._said):
            self._send_away(visitor)
        self._selector.close()

    def _admit(self, listener: socket.socket) -> None:
        try:
            visitor = not_for_children(listener.accept()[0])
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise
            return  # it is gone already
        visitor.setblocking(False)
        self._said[visitor] = b"", time.monotonic() + HELLO_SECONDS
        self._selector.register(visitor, selectors.EVENT_READ)

    def _listen_to(self, visitor: socket.socket) -> None:
        said, limit = self._said[visitor]
        try:
            more = visitor.recv(HELLO.size - len(said))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        said += more
        self._said[visitor] = said, limit
        if not more:
            self._send_away(visitor)
        elif len(said) == HELLO.size:
            secret, rank = HELLO.unpack(said)
            if secrets.compare_digest(secret, self._secret) and rank in self.missing:
                self._let_in(visitor, rank)
            else:
                self._send_away(visitor)

    def _let_in(self, visitor: socket.socket, rank: int) -> None:
        self._forget(visitor)
        self.missing.remove(rank)
        self.found[rank] = visitor

    def _send_away(self, visitor: socket.socket) -> None:
        self._forget(visitor)
        visitor.close()

    def _forget(self, visitor: socket.socket) -> None:
        self._selector.unregister(visitor)
        del self._said[visitor]
