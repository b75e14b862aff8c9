"""Connects the ranks of a torch process group with each other: by TCP, and on one host by Unix sockets.

These take 0.2 s of a core for a gigabyte, TCP over the loopback interface 0.35.
"""

from __future__ import annotations

import contextlib
import json
import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.transport.address import announced, listening
from hvd_dyncomp.transport.base import LATE_SECONDS
from hvd_dyncomp.transport.forked import not_for_children
from hvd_dyncomp.transport.visitors import HELLO, HELLO_SECONDS, Visitors

logger = logging.getLogger(__name__)

_CARD_BYTES = 1024  # what a rank tells the others of itself, padded
_EARLY_SECONDS = 0.5  # before its time limit, a rank may find that another one's is over
_WAITING = 1024  # connections that may wait to be accepted; strangers may be among them


def connected(group: Any, host: str, seconds: float) -> tuple[dict[int, socket.socket], list[str]]:
    """A connection to every other rank of a group, by rank; and the names of all ranks' hosts. Collective, blocking.

    A connection must begin with a secret that rank 0 makes and the group carries. Logs a warning if it takes long.

    Args:
        group: a process group of any backend; None for that of all ranks.
        host: the name of this rank's host.
        seconds: time limit for all of it.

    Raises:
        TimeoutError: a rank does not connect, or cannot be reached.
        ConnectionError: a rank has ended meanwhile.
        ValueError: an environment variable names no network of this host.
        OSError: no socket can be made.
    """
    rank, size, until = dist.get_rank(group), dist.get_world_size(group), time.monotonic() + seconds
    address = announced()
    with listening(address, _WAITING) as listener, not_for_children(socket.socket(socket.AF_UNIX)) as near:
        # An abstract name: there is no file to remove, the name ends with its socket.
        local = f"hvd_dyncomp-{secrets.token_hex(16)}"
        near.bind(f"\0{local}")
        near.listen(_WAITING)
        card = {"address": address, "port": listener.getsockname()[1], "host": host, "local": local}
        with _reported(rank):
            cards = _exchanged({**card, "secret": secrets.token_hex(16)}, group, until)
        visitors = Visitors((listener, near), cards[0]["secret"].encode(), range(rank + 1, size))
        found = visitors.found
        try:
            # A listener accepts connections before `accept` is called, so no ranks wait for each other in a circle.
            for other in range(rank):
                found[other] = _near(cards[other], host) or _far(cards[other], other, until)
                found[other].sendall(HELLO.pack(cards[0]["secret"].encode(), rank))
            visitors.receive(until)
        except BaseException:
            for connection in found.values():
                connection.close()
            raise
        finally:
            visitors.close()
    for connection in found.values():
        _tune(connection)
    return found, [card["host"] for card in cards]


@contextlib.contextmanager
def _reported(rank: int) -> Iterator[None]:
    """Log a warning if the other ranks are late."""

    def report() -> None:
        logger.warning(
            "rank %d has waited %g s for all ranks of its process group to call compress or transport",
            rank,
            LATE_SECONDS,
        )

    timer = threading.Timer(LATE_SECONDS, report)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _exchanged(card: dict[str, Any], group: Any, until: float) -> list[dict[str, Any]]:
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
    work = dist.all_gather(everyone, mine, group=group, async_op=True)
    try:
        work.wait(timedelta(seconds=max(until - time.monotonic(), 1e-3)))
    except RuntimeError as error:  # torch has no kind of its own for time limits, and may be early by milliseconds
        if time.monotonic() >= until - _EARLY_SECONDS or "timed out" in str(error):
            raise TimeoutError("not all ranks of the process group have called compress or transport") from error
        raise ConnectionError(f"the ranks of the process group cannot find each other: {error}") from error
    return [json.loads(each.cpu().numpy().tobytes()) for each in everyone]


def _near(card: dict[str, Any], host: str) -> socket.socket | None:
    """A connection to a rank on this host; None if it is on another host, or in another network namespace."""
    if card["host"] != host:
        return None
    connection = not_for_children(socket.socket(socket.AF_UNIX))
    connection.settimeout(HELLO_SECONDS)
    try:
        connection.connect(f"\0{card['local']}")
    except OSError:
        connection.close()
        return None
    return connection


def _far(card: dict[str, Any], rank: int, until: float) -> socket.socket:
    address, port = card["address"], card["port"]
    error: OSError | None = None
    try:
        for family, kind, protocol, _, there in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
            connection = not_for_children(socket.socket(family, kind, protocol))
            try:
                connection.settimeout(max(until - time.monotonic(), 1e-3))
                connection.connect(there)
            except OSError as caught:
                connection.close()
                error = caught
            else:
                return connection
    except OSError as caught:  # the name is not known here
        error = caught
    raise TimeoutError(
        f"rank {rank} cannot be reached at {address}, port {port}: {error}; GLOO_SOCKET_IFNAME says which network "
        "interface to use"
    ) from error


def _tune(connection: socket.socket) -> None:
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that has lost power sends nothing; this notices it within a minute and a half.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 6)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
