"""A connection to every other rank, and one thread that reads and writes all of them.

torch's own point-to-point messages cannot be used: there is no way to test without blocking whether one has arrived, or
to wake a thread that blocks; a message longer than expected ends the process; and a thread that waits for a message
when Python exits ends the process with an error.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping

import torch

from hvd_dyncomp.transport.collectives import KEY_BYTES
from hvd_dyncomp.transport.forked import not_for_children

_HEADER = struct.Struct(f"<{KEY_BYTES}sQ")  # key, bytes in the body
_CLOSE_SECONDS = 10.0  # for unsent messages when the mesh is closed
_MOST_BYTES = 2**40  # no message is that long
_SMALL_BYTES = 1024

Room = Callable[[int], torch.Tensor]


def _view(body: torch.Tensor) -> memoryview:
    return memoryview(body.contiguous().numpy())  # type: ignore[arg-type]  # arrays are buffers from Python 3.12 on


class _Peer:
    """The connection to one rank.

    Attributes:
        outgoing: data still to be sent, in order, and what to call when each piece has been sent.
    """

    def __init__(self, rank: int, connection: socket.socket, room: Room) -> None:
        self.rank, self.connection, self._new_room = rank, connection, room
        self.outgoing: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self._header = bytearray(_HEADER.size)
        self._begin()

    def _begin(self) -> None:
        self._key, self._body = b"", torch.empty(0, dtype=torch.uint8)
        self._room, self._in_body = memoryview(self._header), False

    def read(self, arrived: Callable[[int, bytes, torch.Tensor], None]) -> None:
        """Read what has arrived.

        Raises:
            OSError: the connection is broken or closed.
        """
        while True:
            try:
                count = self.connection.recv_into(self._room) if self._room else 0
            except (BlockingIOError, InterruptedError):
                return
            if self._room and not count:
                raise ConnectionError("it has closed the connection")
            self._room = self._room[count:]
            if self._room:
                continue
            if not self._in_body:
                self._key, length = _HEADER.unpack(self._header)
                if length > _MOST_BYTES:
                    raise ConnectionError(f"it announces a message of {length} bytes")
                self._body, self._in_body = self._new_room(length), True
                self._room = _view(self._body)
            if not self._room:
                key, body = self._key, self._body
                self._begin()
                arrived(self.rank, key, body)

    def write(self) -> None:
        """Write as much as the connection takes.

        Raises:
            OSError: the connection is broken.
        """
        while self.outgoing:
            data, sent = self.outgoing[0]
            try:
                count = self.connection.send(data) if data else 0
            except (BlockingIOError, InterruptedError):
                return
            if count < len(data):
                self.outgoing[0] = data[count:], sent
                continue
            self.outgoing.popleft()
            if sent is not None:
                sent()


class Mesh:
    """Sends messages to other ranks, in order, and receives theirs.

    Args:
        connections: by rank, each `not_for_children`; the mesh closes them.
        arrived: called with rank, key and body (uint8) of every message that arrives.
        lost: called once with a rank and an error, when nothing more can arrive from that rank.
        room: called with a number of bytes; returns a uint8 vector in main memory for a message that arrives.

    The mesh's thread calls all three; they must be quick and must not raise.
    """

    def __init__(
        self,
        connections: Mapping[int, socket.socket],
        arrived: Callable[[int, bytes, torch.Tensor], None],
        lost: Callable[[int, Exception], None],
        room: Room,
    ) -> None:
        self._arrived, self._lost = arrived, lost
        self._peers = {rank: _Peer(rank, connection, room) for rank, connection in connections.items()}
        self._selector = not_for_children(selectors.DefaultSelector())
        self._ear, self._bell = map(not_for_children, socket.socketpair())
        for end in (self._ear, self._bell, *connections.values()):
            end.setblocking(False)
        self._selector.register(self._ear, selectors.EVENT_READ, None)
        for peer in self._peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._posted: deque[tuple[int, memoryview, memoryview, Callable[[], None]]] = deque()
        self._until: float | None = None  # the latest end of the thread
        self._thread = threading.Thread(target=self._loop, name="hvd_dyncomp.mesh", daemon=True)
        self._thread.start()

    def post(self, rank: int, key: bytes, body: torch.Tensor, sent: Callable[[], None]) -> None:
        """Send a message. Does not block.

        Args:
            key: `KEY_BYTES` bytes.
            body: (n,) uint8 in main memory; it must not change until `sent` is called.
            sent: called when the message has been sent, or its receiver is gone.
        """
        view = _view(body)
        self._posted.append((rank, memoryview(_HEADER.pack(key, len(view))), view, sent))
        self._ring()

    def close(self) -> None:
        """Send unsent messages, for some seconds at most, and close all connections."""
        self._until = time.monotonic() + _CLOSE_SECONDS
        self._ring()
        if threading.current_thread() is not self._thread:
            self._thread.join(_CLOSE_SECONDS)

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # the bell is full, or the thread has ended
            self._bell.send(b"\0")

    def _loop(self) -> None:
        while self._until is None or (self._peers and time.monotonic() < self._until):
            for key, events in self._selector.select(None if self._until is None else _CLOSE_SECONDS):
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._ear.recv(4096)
                    self._take_posted()
                else:
                    self._serve(key.data, events)
            if self._until is not None:
                self._take_posted()  # perhaps something else than the bell has woken this thread
                self._hang_up()
        for peer in list(self._peers.values()):
            self._lose(peer, ConnectionError("this rank has left the group"))
        for end in (self._ear, self._bell):
            end.close()
        self._selector.close()

    def _hang_up(self) -> None:
        """Tell peers that have received everything that no more will come; they close then.

        Not the other way round: closing a connection with unread data in it discards data that was sent.
        """
        for peer in self._peers.values():
            if not peer.outgoing:
                with contextlib.suppress(OSError):
                    peer.connection.shutdown(socket.SHUT_WR)

    def _take_posted(self) -> None:
        while self._posted:
            rank, header, body, sent = self._posted.popleft()
            peer = self._peers.get(rank)
            if peer is None:
                sent()
                continue
            if len(body) <= _SMALL_BYTES:  # one packet instead of two
                peer.outgoing.append((memoryview(b"".join((header, body))), sent))
            else:
                peer.outgoing.append((header, None))
                peer.outgoing.append((body, sent))
            self._serve(peer, selectors.EVENT_WRITE)

    def _serve(self, peer: _Peer, events: int) -> None:
        if peer.rank not in self._peers:  # lost a moment ago
            return
        try:
            if events & selectors.EVENT_READ:
                peer.read(self._arrived)
            peer.write()
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.outgoing else 0)
            self._selector.modify(peer.connection, wanted, peer)
        except Exception as error:  # noqa: BLE001  # after any error nothing more can be read from that rank
            self._lose(peer, error)

    def _lose(self, peer: _Peer, error: Exception) -> None:
        del self._peers[peer.rank]
        self._selector.unregister(peer.connection)
        peer.connection.close()
        lost = ConnectionError(f"the connection to rank {peer.rank} was lost: {error}; its own output says why")
        self._lost(peer.rank, lost)
        for _, sent in peer.outgoing:
            if sent is not None:
                sent()
        peer.outgoing.clear()
