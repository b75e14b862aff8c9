"""A torch process group as the transport. The group says who the ranks are; messages go by connections of our own.

torch's collectives meet in the order of calls, which may not be the same on all ranks here, and its messages between
two ranks cannot be polled (`mesh`). So nothing here disturbs what else is sent in the group, such as
`DistributedDataParallel`'s own collectives, whenever that is.
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

_BACKGROUND_SECONDS = 0.02  # between two calls of what goes on in the background, if nothing arrives

_news = threading.Event()


def _pause() -> None:
    _news.wait(_BACKGROUND_SECONDS)
    _news.clear()


_background = Background(_pause)


class ProcessGroupTransport(base.Transport):
    """The ranks of a process group. To be made by all of them at once; blocks until they have connected.

    Args:
        group: of any backend; None for that of all ranks.
        timeout: for whatever is waited for; a rank that waits longer raises an error instead of going on for ever.

    Attributes:
        models: how many have been compressed over it, the same on all ranks.

    Raises:
        ValueError: torch.distributed is not initialized, or this process is no member of the group.
        TimeoutError: a rank has not come.
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
        self._end = weakref.finalize(self, close)  # also when Python ends: what others wait for must leave

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
        """As the contract has it.

        Raises:
            ConnectionError: a rank is gone.
            TimeoutError: a rank has not started the collective.
        """
        with self._collectives.changed:
            if not self._collectives.changed.wait_for(lambda: handle.over, self._seconds):
                ranks = sorted(handle.missing)
                raise TimeoutError(f"{handle.name}: nothing has come from ranks {ranks} in {self._seconds:g} s")
        return handle.result()

    def in_background(self, work: Callable[[], bool]) -> None:
        _background.add(work)

    def give_way(self) -> None:
        pass  # the mesh's thread sleeps until it is rung, so the system lets it run at once; to wait cost 7 % of a step

    def advise(self, devices: Iterable[torch.device]) -> None:
        pass

    @property
    def closed(self) -> bool:
        """Whether `close` has been called."""
        return not self._end.alive

    def close(self) -> None:
        """Sends what others wait for and closes the connections. Whoever waits for this rank then gets an error."""
        self._end()


def _wired(rank: int, size: int, connections: dict[int, socket.socket]) -> tuple[Collectives, Callable[[], None]]:
    """Collectives over connections, and what ends them. Neither keeps the transport alive."""

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


# For as long as there is the group: whether one has to be made must not depend on what a rank has collected as garbage.
_transports: weakref.WeakKeyDictionary[Any, ProcessGroupTransport] = weakref.WeakKeyDictionary()


def transport(group: Any = None, *, timeout: timedelta = timedelta(minutes=30)) -> ProcessGroupTransport:
    """The transport over a process group, as `Controller` takes it. There is one a group; collective the first time.

    Args:
        group: None for that of all ranks.
        timeout: for whatever is waited for, when it is made.

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
