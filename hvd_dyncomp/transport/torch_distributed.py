"""A torch process group as the transport. The group defines the ranks; messages use connections of this package.

torch matches collectives by the order of calls, which differs between ranks here, and its messages between two ranks
cannot be polled (`mesh`). So nothing here interferes with other traffic in the group, such as the collectives of
`DistributedDataParallel`; but for `sum_all`, which every rank calls at the same point of the program.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.checks import finite, shown
from hvd_dyncomp.transport import base
from hvd_dyncomp.transport.background import Background
from hvd_dyncomp.transport.base import LATE_SECONDS
from hvd_dyncomp.transport.collectives import Collective, Collectives
from hvd_dyncomp.transport.connect import connected
from hvd_dyncomp.transport.mesh import Mesh
from hvd_dyncomp.transport.staging import Staging

logger = logging.getLogger(__name__)

_BACKGROUND_SECONDS = 0.02  # between two rounds of background work, if nothing arrives
_DEFAULT_SECONDS = 1800.0
_MOST_SECONDS = 2e6  # 23 days; what waits in the kernel counts milliseconds in 31 bits

_news = threading.Event()


def _pause() -> None:
    _news.wait(_BACKGROUND_SECONDS)
    _news.clear()


_background = Background(_pause)


class ProcessGroupTransport(base.Transport):
    """The ranks of a process group. All of them make it at the same time; it blocks until they have connected.

    Args:
        group: of any backend; None for the group of all ranks.
        timeout: time limit of every wait, in seconds or as a timedelta; a rank that waits longer raises an error.

    Attributes:
        models: number of calls of `compress` over it, the same on all ranks.
        compressed: what compresses a model over it, by a checksum of the model as it was.

    Raises:
        ValueError: torch.distributed is not initialized, this process is not a member of the group, or `timeout` is
            not a time; or an environment variable names no network of this host.
        TypeError: `group` is not a process group.
        TimeoutError: a rank does not connect.
    """

    rank_call = "torch.distributed.get_rank()"
    elastic = ""

    def __init__(self, group: Any = None, *, timeout: float | timedelta = _DEFAULT_SECONDS) -> None:
        _check_member(group)
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group = weakref.ref(
            group or dist.group.WORLD
        )  # which would live as long as the transport (`_transports`)
        self._seconds = time_limit(timeout)
        connections, self._hosts = connected(group, self.host, self._seconds)
        self._collectives, close = _wired(self._rank, self._size, connections)
        self.models = 0
        self.compressed: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
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

    def sum_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As `base.Transport.sum_all`, by torch's own all_reduce, with the group's own time limit.

        It sends each value twice at most; the mesh would send it to every other rank.

        Raises:
            RuntimeError: the group no longer exists, or another rank does not answer.
        """
        group = self._group()
        if group is None:
            raise RuntimeError("the process group of this transport has been destroyed")
        alike: defaultdict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = defaultdict(list)
        others: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if f"{tensor.device.type}:" in dist.get_backend_config(group):
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                alike[real.dtype, real.device].append(real)
            else:  # on the CPU with NCCL alone
                others[name] = tensor
        for parts in alike.values():
            flat = torch.cat([part.view(-1) for part in parts])
            dist.all_reduce(flat, group=group)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
                part.copy_(total.view(part.shape))
        super().sum_all(others)

    def poll(self, handle: Collective) -> bool:
        return handle.over

    def limit(self, timeout: float | timedelta) -> None:
        """Set the time limit of every wait from now on, in seconds or as a timedelta."""
        self._seconds = time_limit(timeout)

    def wait(self, handle: Collective) -> torch.Tensor:
        """As `base.Transport.wait`. Logs a warning if it takes long, but none after `wait_for`, whose caller says more.

        Raises:
            ConnectionError: a rank has ended.
            TimeoutError: a rank has not started the collective in time.
        """
        if handle.waited is None and not self.wait_for(handle, LATE_SECONDS):
            self._report(handle)
        self.wait_for(handle, _MOST_SECONDS)
        return handle.result()

    def wait_for(self, handle: Collective, seconds: float) -> bool:
        """As `base.Transport.wait_for`. The time limit counts from the first wait for the collective."""
        now = time.monotonic()
        if handle.waited is None:
            handle.waited = now
        left = handle.waited + self._seconds - now
        with self._collectives.changed:
            over = self._collectives.changed.wait_for(lambda: handle.over, max(0.0, min(seconds, left)))
        if not over and left <= seconds:
            self._give_up(handle)
        return handle.over

    def missing(self, handle: Collective) -> list[int]:
        """As `base.Transport.missing`."""
        with self._collectives.changed:
            return sorted(handle.missing)

    def _report(self, handle: Collective) -> None:
        """Say what is waited for."""
        ranks = self.missing(handle)
        what = f"nothing has come from ranks {ranks}" if ranks else "its messages have not left"
        logger.warning(
            "rank %d has waited %.0f s for %s: %s; the time limit is %g s",
            self._rank,
            time.monotonic() - (handle.waited or 0),
            handle.name,
            what,
            self._seconds,
        )

    def _give_up(self, handle: Collective) -> None:
        with self._collectives.changed:
            ranks = sorted(handle.missing)
            error = TimeoutError(f"{handle.name}: nothing has come from ranks {ranks} in {self._seconds:g} s")
            if not ranks:
                error = TimeoutError(f"{handle.name}: this rank's messages were not sent in {self._seconds:g} s")
            for rank in ranks or range(self._size):  # what else waits for them has waited long enough
                self._collectives.lost(rank, error)
            handle.error = error

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


def transport(group: Any = None, *, timeout: float | timedelta | None = None) -> ProcessGroupTransport:
    """The transport over a process group, for `Controller`. There is one per group; the first call is collective.

    Args:
        group: None for the group of all ranks.
        timeout: time limit of every wait over this group from now on, whoever waits: in seconds, or a timedelta. None
            leaves it as it is; it is 30 minutes at first.

    Raises:
        ValueError, TypeError, TimeoutError: see `ProcessGroupTransport`.
    """
    _check_member(group)
    group = group or dist.group.WORLD
    found = _transports.get(group)
    if found is None or found.closed:
        found = ProcessGroupTransport(group, timeout=_DEFAULT_SECONDS if timeout is None else timeout)
        _transports[group] = found
    elif timeout is not None:
        found.limit(timeout)
    return found


def time_limit(timeout: float | timedelta) -> float:
    """A time limit in seconds.

    Raises:
        ValueError: it is neither a number of seconds nor a timedelta, or out of range.
    """
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else finite("timeout", timeout)
    if not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"timeout must be more than 0 s and at most {_MOST_SECONDS:.0f} s, got {shown(timeout)}")
    return seconds


def _check_member(group: Any) -> None:
    """Check that this process is in a process group.

    Raises:
        ValueError, TypeError: it is not.
    """
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialized; call torch.distributed.init_process_group() first")
    if not (group is None or group is dist.GroupMember.NON_GROUP_MEMBER or isinstance(group, dist.ProcessGroup)):
        raise TypeError(f"group must be a process group or None, got {shown(group)}")
    if dist.get_rank(group) < 0:  # type: ignore[arg-type]  # torch's sign for "no member" is a number
        raise ValueError(
            f"this process, rank {dist.get_rank()} of all, is no member of the process group; call "
            "DistributedDataParallel, compress and transport on the group's members only"
        )
