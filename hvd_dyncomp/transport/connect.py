"""Connects the ranks of a torch process group with each other: by TCP, and on one host by Unix sockets.

These take 0.2 s of a core for a gigabyte, TCP over the loopback interface 0.35.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any

import torch
import torch.distributed as dist

_CARD_BYTES = 1024  # what a rank tells the others of itself, padded
_HELLO = struct.Struct("<32sI")  # the group's secret, rank
_HELLO_SECONDS = 5.0  # for a stranger to say who it is
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface


def connected(group: Any, host: str, seconds: float) -> tuple[dict[int, socket.socket], list[str]]:
    """A connection to every other rank of a group, by rank; and the names of all ranks' hosts. Collective, blocking.

    A connection must begin with a secret that rank 0 makes and the group carries.

    Args:
        group: a process group of any backend; None for that of all ranks.
        host: the name of this rank's host.
        seconds: time limit for all of it.

    Raises:
        TimeoutError: a rank does not connect, or cannot be reached.
        OSError: no socket can be made.
    """
    rank, size, until = dist.get_rank(group), dist.get_world_size(group), time.monotonic() + seconds
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with (
        socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=size) as listener,
        socket.socket(socket.AF_UNIX) as near,
    ):
        # An abstract name: there is no file to remove, the name ends with its socket.
        local = f"hvd_dyncomp-{secrets.token_hex(16)}"
        near.bind(f"\0{local}")
        near.listen(size)
        card = {"address": _address(), "port": listener.getsockname()[1], "host": host, "local": local}
        cards = _exchanged({**card, "secret": secrets.token_hex(16)}, group)
        secret = cards[0]["secret"].encode()
        found: dict[int, socket.socket] = {}
        try:
            # A listener accepts connections before `accept` is called, so no ranks wait for each other in a circle.
            for other in range(rank):
                found[other] = _near(cards[other], host) or _far(cards[other], other, until)
                found[other].sendall(_HELLO.pack(secret, rank))
            while len(found) < size - 1:
                expected = set(range(rank + 1, size)) - set(found)
                other, connection = _accepted((listener, near), secret, expected, until)
                found[other] = connection
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
    for connection in found.values():
        _tune(connection)
    return found, [card["host"] for card in cards]


def _exchanged(card: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """Every rank's card, as JSON: data from another rank is not unpickled."""
    text = json.dumps(card).encode()
    if len(text) > _CARD_BYTES:
        raise ValueError(f"the names of this host are too long: {text.decode()}")
    backends = dist.get_backend(group)  # one, or "cpu:gloo,cuda:nccl"
    own = group or dist.group.WORLD
    nccl = "nccl" in backends and "gloo" not in backends
    device = (getattr(own, "bound_device_id", None) or "cuda") if nccl else "cpu"
    mine = torch.frombuffer(bytearray(text.ljust(_CARD_BYTES)), dtype=torch.uint8).to(device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [json.loads(each.cpu().numpy().tobytes()) for each in everyone]


def _address() -> str:
    """The address of this host for others: of the interface that Gloo uses, or of the one that leads to rank 0."""
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = os.environ.get("MASTER_ADDR")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        if interface:
            packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            return socket.inet_ntoa(packed[20:24])
    if not master:
        return socket.gethostname()
    family, _, _, _, there = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(there)  # sends nothing
        mine = probe.getsockname()[0]
    return master if mine == there[0] else mine  # on rank 0's host: the address that others use


def _near(card: dict[str, Any], host: str) -> socket.socket | None:
    """A connection to a rank on this host; None if it is on another host, or in another network namespace."""
    if card["host"] != host:
        return None
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_HELLO_SECONDS)
    try:
        connection.connect(f"\0{card['local']}")
    except OSError:
        connection.close()
        return None
    return connection


def _far(card: dict[str, Any], rank: int, until: float) -> socket.socket:
    address, port = card["address"], card["port"]
    try:
        return socket.create_connection((address, port), timeout=max(until - time.monotonic(), 1e-3))
    except OSError as error:
        raise TimeoutError(
            f"rank {rank} cannot be reached at {address}, port {port}: {error}; GLOO_SOCKET_IFNAME says which network "
            "interface to use"
        ) from error


def _accepted(
    listeners: tuple[socket.socket, ...], secret: bytes, expected: set[int], until: float
) -> tuple[int, socket.socket]:
    """The next connection of an expected rank. Connections of others are closed."""
    while (left := until - time.monotonic()) > 0:
        with selectors.DefaultSelector() as waiting:
            for listener in listeners:
                waiting.register(listener, selectors.EVENT_READ, listener)
            knocked = [key.data for key, _ in waiting.select(left)]
        if not knocked:
            break
        connection, _ = knocked[0].accept()
        connection.settimeout(_HELLO_SECONDS)
        try:
            said, rank = _HELLO.unpack(connection.recv(_HELLO.size, socket.MSG_WAITALL))
        except (OSError, struct.error):
            said, rank = b"", -1
        if secrets.compare_digest(said, secret) and rank in expected:
            return rank, connection
        connection.close()
    raise TimeoutError(f"ranks {sorted(expected)} have not connected")


def _tune(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has lost power sends nothing; this notices it within a minute and a half.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
