"""A torch process group as the transport. The group defines the ranks; messages use connections of this package.

torch matches collectives by the order of calls, which differs between ranks here, and its messages between two ranks
cannot be polled (`mesh`). So nothing here interferes with other traffic in the group, such as the collectives of
`DistributedDataParallel`.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.transport import base
from hvd_dyncomp.transport.background import Background
from hvd_dyncomp.transport.collectives import Collective, Collectives
from hvd_dyncomp.transport.connect import connected
from hvd_dyncomp.transport.mesh import Mesh
from hvd_dyncomp.transport.staging import Staging

_BACKGROUND_SECONDS = 0.02  # between two rounds of background work, if nothing arrives

_news = threading.Event()


def _pause() -> None:
    _news.wait(_BACKGROUND_SECONDS)
    _news.clear()


_background = Background(_pause)


class ProcessGroupTransport(base.Transport):
    """The ranks of a process group. All of them make it at the same time; it blocks until they have connected.

    Args:
        group: of any backend; None for the group of all ranks.
        timeout: of every wait; a rank that waits longer raises an error.

    Attributes:
        models: number of models compressed over it, the same on all ranks.

    Raises:
        ValueError: torch.distributed is not initialized, or this process is not a member of the group.
        TimeoutError: a rank does not connect.
    """

    def __init__(self, group: Any = None, *, timeout: timedelta = timedelta(minutes=30)) -> None:
        if not dist.is_initialized():
            raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
        if dist.get_rank(group) < 0:
            raise ValueError("this process is no member of the process group")
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._seconds = timeout.total_seconds()
        connections, self._hosts = connected(group, self.host, self._seconds)
        self._collectives, close = _wired(self._rank, self._size, connections)
        self.models = 0
        self._end = weakref.finalize(self, close)  # also when Python exits: other ranks wait for unsent messages

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    @property
    def host(self) -> str:
        return socket.gethostname()

    @property
    def local_size(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self._hosts.count(self.host)))  # torchrun's

    def obstacle(self, device: torch.device) -> str:
        return "" if device.type in ("cpu", "cuda") else "messages are copied to main memory from CUDA devices only"

    def within(self, process_set: Any) -> ProcessGroupTransport:
        if process_set is not None:
            raise ValueError(f"a process group has no process sets, got {process_set!r}")
        return self

    def alltoall(self, tensor: torch.Tensor, splits: list[int], name: str) -> Collective:
        return self._collectives.alltoall(tensor, splits, name)

    def allgather(self, tensor: torch.Tensor, name: str) -> Collective:
        return self._collectives.allgather(tensor, name)

    def sum(self, tensor: torch.Tensor, name: str) -> Collective:
        return self._collectives.sum(tensor, name)

    def poll(self, handle: Collective) -> bool:
        return handle.over

    def wait(self, handle: Collective) -> torch.Tensor:
        """As `base.Transport.wait`.

        Raises:
            ConnectionError: a rank has ended.
            TimeoutError: a rank has not started the collective in time.
        """
        with self._collectives.changed:
            if not self._collectives.changed.wait_for(lambda: handle.over, self._seconds):
                ranks = sorted(handle.missing)
                error = TimeoutError(f"{handle.name}: nothing has come from ranks {ranks} in {self._seconds:g} s")
                if not ranks:
                    error = TimeoutError(f"{handle.name}: this rank's messages were not sent in {self._seconds:g} s")
                for rank in ranks or range(self._size):  # what else waits for them has waited long enough
                    self._collectives.lost(rank, error)
                handle.error = error
        return handle.result()

    def in_background(self, work: Callable[[], bool]) -> None:
        _background.add(work)

    def give_way(self) -> None:
        pass  # the mesh's thread sleeps until it is woken, and then runs at once; a pause here cost 7 % of a step

    def advise(self, devices: Iterable[torch.device]) -> None:
        pass

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._end.alive

    def close(self) -> None:
        """Send unsent messages and close the connections. Ranks that wait for this one then get an error."""
        self._end()


def _wired(rank: int, size: int, connections: dict[int, socket.socket]) -> tuple[Collectives, Callable[[], None]]:
    """Collectives over connections, and a function that closes them. Neither keeps the transport alive."""

    def arrived(*message: Any) -> None:
        collectives.arrived(*message)
        _news.set()

    def failed(error: Exception) -> None:
        for other in connections:
            collectives.lost(other, error)

    def close() -> None:
        staging.close()
        mesh.close()

    staging = Staging(lambda *message: mesh.post(*message), failed)
    collectives = Collectives(rank, size, staging.post)
    mesh = Mesh(connections, arrived, collectives.lost, staging.room)
    return collectives, close


# Kept as long as the group exists: all ranks must agree whether a transport has to be made, whatever a rank's garbage
# collector has done.
_transports: weakref.WeakKeyDictionary[Any, ProcessGroupTransport] = weakref.WeakKeyDictionary()


def transport(group: Any = None, *, timeout: timedelta = timedelta(minutes=30)) -> ProcessGroupTransport:
    """The transport over a process group, for `Controller`. There is one per group; the first call is collective.

    Args:
        group: None for the group of all ranks.
        timeout: of every wait; used by the first call.

    Raises:
        ValueError, TimeoutError: see `ProcessGroupTransport`.
    """
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    found = None if group is None else _transports.get(group)
    if found is None or found.closed:
        found = ProcessGroupTransport(group, timeout=timeout)
        _transports[group] = found
    return found
