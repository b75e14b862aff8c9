"""A torch process group as the transport: asynchronous collectives of `torch.distributed`, in groups of their own.

Nothing here interferes with other traffic of the program's group, such as the collectives of `DistributedDataParallel`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import os
import secrets
import socket
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.checks import shown
from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.transport import base
from hvd_dyncomp.transport.background import Background
from hvd_dyncomp.transport.base import LATE_SECONDS, gather_json
from hvd_dyncomp.transport.collective_handle import CollectiveHandle, lost, message_of, timed_out
from hvd_dyncomp.transport.crossed import Wait, Watch
from hvd_dyncomp.transport.phase_groups import Groups, OrderedLauncher, close, close_at_exit, keep_for_ever
from hvd_dyncomp.transport.sockets import Sockets, any_closed

logger = logging.getLogger(__name__)

_BACKGROUND_SECONDS = 0.02  # between two rounds of background work, if no data arrives
_CLOSE_SECONDS = 10.0  # for messages in flight that other ranks wait for
_LAST_SECONDS = 0.01  # for one of torch's threads to return from the callback that reports arrived data
_CHECK_SECONDS = 1.0  # between two checks of the other ranks
_NOTE_SECONDS = 1.0  # within which ranks that wait for the same collective report it

_news = threading.Event()
_waiters: set[int] = set()  # threads that have waited for a collective
_waits = itertools.count(1)  # of long waits


def _pause() -> None:
    _news.wait(_BACKGROUND_SECONDS)
    _news.clear()


_background = Background(_pause)


class ProcessGroupTransport(base.Transport):
    """The ranks of a process group. All of them make it at the same time; it blocks until they have connected.

    Args:
        group: of any backend; None for the group of all ranks.
        phases, name: for one model: the ranks that take part in each phase of an exchange, by name and in order; and a
            name for it in the job's store.

    Attributes:
        hosts: each rank's, by name.

    Raises:
        ValueError: torch.distributed is not initialized, or this process is not a member of the group.
        TypeError: `group` is not a process group.
        TimeoutError, ConnectionError: a rank does not make it in the group's time limit, or has ended.
    """

    rank_call = "torch.distributed.get_rank()"
    elastic = ""

    def __init__(
        self, group: Any = None, phases: Mapping[str, Sequence[int]] | None = None, name: str | None = None
    ) -> None:
        _check_member(group)
        group = group or dist.group.WORLD
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._group = weakref.ref(group)  # which would live as long as the transport (`_transports`)
        everyone = range(self._size)
        with _all_come(self._rank):
            groups = Groups(group, name or f"hvd_dyncomp.{_token(group)}")
            self._all = groups.among(everyone, "all")
            self._sums = groups.among(everyone, "sums", gpus=True) if phases else self._all
            self._phase_groups = groups.by_phase(phases or {})
        self._name, self.limit = groups.name, groups.limit
        self._launcher = OrderedLauncher(self._phase_groups)
        self.in_order = groups.nccl
        self._started: weakref.WeakSet[CollectiveHandle] = weakref.WeakSet()
        self._counts: defaultdict[str, int] = defaultdict(int)
        self._number = 0  # of those that all ranks start in one order
        self._global_ranks: list[int] = dist.get_process_group_ranks(group)
        self._checked, self._closed = 0.0, False  # when `check_peers` last looked, and whether sockets were closed
        self._shared: ProcessGroupTransport = self
        self._end = weakref.finalize(self, _close, os.getpid(), groups.made, self._started)
        self._close_groups = functools.partial(close, groups.made, quiet=False)
        self._sockets = [sockets for group, sockets in groups.made.items() if len(sockets) == group.size()]
        _alive.add(self)
        self._keep_sockets(groups)
        self.hosts: list[str] = gather_json(self, self.host, "hvd_dyncomp.hosts") if phases is None else []
        self._made = 0

    def _keep_sockets(self, groups: Groups) -> None:
        """Keep the groups' sockets, and no others, from this process's children. Collective; blocks."""
        doubts = torch.tensor([groups.extra_sockets], dtype=torch.int64, device="cpu")
        if self._size > 1:
            self.wait(self.sum(doubts, "hvd_dyncomp.sockets"))
        groups.keep_sockets(gather_json(self, groups.connections, "hvd_dyncomp.connections") if doubts.item() else None)

    def __reduce__(self) -> tuple:
        raise TypeError(
            "the connections of a process group cannot be pickled, nor can a Controller that has used them: save the "
            "controller's state_dict(), and load it into a new Controller"
        )

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
        return int(os.environ.get("LOCAL_WORLD_SIZE", self._shared.hosts.count(self.host)))  # torchrun's

    def unsupported_reason(self, device: torch.device) -> str:
        return "" if device.type in ("cpu", "cuda") else "messages are sent from CPUs and from CUDA devices only"

    @property
    def shared(self) -> ProcessGroupTransport:
        return self._shared

    def for_exchanges(self, phases: Callable[[Sequence[str]], Mapping[str, Sequence[int]]]) -> ProcessGroupTransport:
        """As `base.Transport.for_exchanges`. Collective; blocks.

        Raises:
            LockstepError: the ranks' phases have different names. On all ranks.
        """
        found = phases(self.hosts)
        everyone = gather_json(self, list(found), "hvd_dyncomp.phases")
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                raise LockstepError(
                    f"rank 0 would exchange by {', '.join(everyone[0])}, rank {rank} by {', '.join(theirs)}: give "
                    "hierarchical= the same value on every rank"
                )
        self._made += 1
        group = self._group()
        if group is None:
            raise RuntimeError(
                "the process group of this transport has been destroyed; make a transport of a group that exists"
            )
        made = ProcessGroupTransport(group, found, f"{self._name}.{self._made}")
        made._shared = self
        return made

    def alltoall(
        self,
        tensor: torch.Tensor,
        ranks: Sequence[int],
        splits: list[int],
        arriving: list[int],
        name: str,
        room: torch.Tensor | None = None,
    ) -> CollectiveHandle:
        bucket, _, phase = name.rpartition(".")
        groups = self._phase_groups.get(phase)
        if groups is None:
            return self._begun(name, tensor, lambda: self._all.alltoall(tensor, splits, arriving, room))
        handle = self._new(name, tensor)
        # The call that starts the bucket before it may start it, on behalf of another GPU.
        here = (
            torch.cuda.stream(torch.cuda.current_stream(tensor.device)) if tensor.is_cuda else contextlib.nullcontext()
        )

        def start() -> tuple[list[Any], torch.Tensor]:
            with here:
                return groups.alltoall(tensor, splits, arriving, room)

        self._launcher.enqueue(bucket, phase, lambda: handle.start(start))
        return handle

    def allgather(self, tensor: torch.Tensor, name: str, arriving: list[int] | None = None) -> CollectiveHandle:
        copies, splits = tensor.repeat(self._size), [tensor.numel()] * self._size
        if arriving is not None:
            return self.alltoall(copies, range(self._size), splits, arriving, name)
        lengths = torch.zeros(self._size, dtype=torch.int64, device="cpu")
        lengths[self._rank] = tensor.numel()
        handle = self.sum(lengths, name)
        handle.then = lambda lengths: self._all.alltoall(copies, splits, lengths.tolist())
        return handle

    def sum(self, tensor: torch.Tensor, name: str) -> CollectiveHandle:
        groups = self._sums if name.endswith(".uncompressed") else self._all
        return self._begun(name, tensor, lambda: ([groups.sum(tensor)], tensor), numbered=groups is self._all)

    def _new(self, name: str, tensor: torch.Tensor) -> CollectiveHandle:
        self._counts[name] += 1
        handle = CollectiveHandle(
            f"{name}#{self._counts[name]}", tensor, _news.set, in_order=self.in_order and tensor.is_cuda
        )
        self._started.add(handle)
        return handle

    def _begun(
        self,
        name: str,
        tensor: torch.Tensor,
        start: Callable[[], tuple[list[Any], torch.Tensor]],
        *,
        numbered: bool = True,
    ) -> CollectiveHandle:
        """Start a collective. `numbered`: all ranks start it in one order, so it counts in `_number`."""
        handle = self._new(name, tensor)
        if numbered:
            self._number += 1
            handle.number = self._number
        handle.start(start)
        return handle

    def poll(self, handle: CollectiveHandle) -> bool:
        return handle.over

    def wait(self, handle: CollectiveHandle) -> torch.Tensor:
        """As `base.Transport.wait`. Warns if it takes long, but not after `wait_for`, whose caller warns itself.

        Raises:
            ConnectionError: a rank has ended.
            TimeoutError: a rank has not started the collective in the process group's time limit.
        """
        speaks, watch = handle.since is None, None
        try:
            while not self.wait_for(handle, min(_CHECK_SECONDS, LATE_SECONDS) if speaks else _CHECK_SECONDS):
                self.check_peers(handle.name.partition("#")[0] + ": ")
                if time.monotonic() < handle.since + LATE_SECONDS:  # type: ignore[operator]  # there is one
                    continue
                if speaks:
                    speaks = False
                    self._report(handle)
                watch = watch or self._watch(handle)
                if watch is not None and (said := watch.crossed()):
                    self.abort(said)  # from now on the ranks' numbers of collectives would differ
                    raise LockstepError(said)
            return handle.result()
        except (ConnectionError, TimeoutError) as error:
            reason = self._reason_of_abort()
            self._close_groups()  # otherwise ranks without a connection to the lost one would wait for this rank
            if reason:
                raise LockstepError(reason) from error
            raise
        finally:
            if watch is not None:
                watch.end()

    def wait_for(self, handle: CollectiveHandle, seconds: float) -> bool:
        handle.since = handle.since or time.monotonic()
        if not handle.over:  # the background thread asks only for collectives that are over
            _waiters.add(threading.get_ident())
        return handle.wait(seconds)

    def _watch(self, handle: CollectiveHandle) -> Watch | None:
        """A watch over a long wait; None where another thread may still start the collective on a rank."""
        if not handle.number or len(_waiters) > 1:
            return None
        under_way = [handle for each in list(_alive) for handle in list(each._started) if not handle.over]
        started = {each._name: each._number for each in list(_alive)}
        wait = Wait(
            handle.name.partition("#")[0],
            self._name,
            handle.number,
            self._global_ranks,
            started,
            alone=under_way == [handle],
            turn=next(_waits),
        )
        return Watch(wait, self._global_ranks[self._rank])

    def missing(self, handle: CollectiveHandle) -> list[int]:
        """As `base.Transport.missing`. Blocks for a second.

        Each rank that calls this notes in the job's store that it waits. So a rank that has not waited as long counts
        as missing.
        """
        if handle.over:
            return []
        try:
            store = dist.PrefixStore("hvd_dyncomp.late", dist.distributed_c10d._get_default_store())
            store.set(f"{handle.name}.{self._rank}", "")
            handle.wait(_NOTE_SECONDS)
            late = [rank for rank in range(self._size) if not store.check([f"{handle.name}.{rank}"])]
        except (RuntimeError, ValueError):  # the store's rank has ended, or the program has destroyed its group
            return []
        return [] if handle.over else late

    def _report(self, handle: CollectiveHandle) -> None:
        """Warn of a long wait."""
        ranks = self.missing(handle)
        logger.warning(
            "rank %d has waited %.0f s for %s%s; the time limit of the process group is %s",
            self._rank,
            LATE_SECONDS,
            handle.name.partition("#")[0],
            f": ranks {ranks} are not waiting for it (do they have fewer batches?)" if ranks else "",
            self.limit,
        )

    def in_background(self, work: Callable[[], bool]) -> None:
        _background.add(work)

    def abort(self, reason: str) -> None:
        """As `base.Transport.abort`. Ranks that lose the connections read the reason in the job's store."""
        with contextlib.suppress(Exception):  # the store's rank has ended
            self._store().compare_set("reason", "", reason)  # the first of all ranks
        self._close_groups()
        self._started.clear()  # at exit nobody waits for them

    def check_peers(self, what: str = "") -> None:
        """As `base.Transport.check_peers`. Gloo may wait on for a rank whose connection it has closed, too.

        Args:
            what: begins the error's text.

        Raises:
            LockstepError: a rank has called `abort`.
            ConnectionError: a rank has ended.
        """
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        if reason := self._reason_of_abort():
            raise LockstepError(reason)
        before, self._closed = self._closed, any(map(any_closed, self._sockets))
        if before and self._closed:  # only a second later: data sent before the end has been received by then
            raise ConnectionError(f"{what}the connection to a rank was lost: the output of that rank says why")

    def _reason_of_abort(self) -> str:
        """The reason of the rank that has called `abort`; "" if none has."""
        with contextlib.suppress(Exception):
            store = self._store()
            return store.get("reason").decode() if store.check(["reason"]) else ""
        return ""

    def _store(self) -> Any:
        return dist.PrefixStore(f"{self._name}.aborted", dist.distributed_c10d._get_default_store())

    # No `yield_cpu`: Gloo's threads sleep until they are woken, and then run at once; a pause there cost 7 % of a step.


@contextlib.contextmanager
def _all_come(rank: int) -> Iterator[None]:
    """Warn if the code in this context, which waits for all ranks, takes long.

    Raises:
        TimeoutError, ConnectionError: a rank does not join in time, or has ended.
    """
    timer = threading.Timer(
        LATE_SECONDS,
        logger.warning,
        (
            "rank %d has waited %g s for all ranks of its process group to call compress, transport or Averager",
            rank,
            LATE_SECONDS,
        ),
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:  # torch's
        text = message_of(error)
        if not (timed_out(text) or lost(error)):
            raise
        raise (TimeoutError if timed_out(text) else ConnectionError)(
            f"not all ranks of the process group have called compress, transport or Averager: {text}"
        ) from error
    finally:
        timer.cancel()


def _close(process: int, groups: Mapping[Any, Sockets], started: Iterable[CollectiveHandle]) -> None:
    """Leave groups when nothing is in flight, or after some seconds: other ranks may wait for messages."""
    if os.getpid() != process:  # a forked child does not own the groups
        for group in groups:  # their destructors would wait for threads, which the child does not have
            keep_for_ever(group)
        return
    until = time.monotonic() + _CLOSE_SECONDS
    close(groups, quiet=all([handle.wait(until - time.monotonic()) for handle in list(started)]))


@atexit.register
def _exit() -> None:
    """When Python exits: afterwards no thread may return to it from C++."""
    for one in list(_alive):
        one._end()
    close_at_exit(_CLOSE_SECONDS)
    _background.stop()
    time.sleep(_LAST_SECONDS)


def _token(group: Any) -> str:
    """A word that is unique in the job, drawn by the first rank. Collective over the group."""
    device = "cpu" if "cpu:" in dist.get_backend_config(group) else torch.device("cuda", torch.cuda.current_device())
    word = torch.frombuffer(bytearray(secrets.token_bytes(8)), dtype=torch.uint8).to(device)
    dist.broadcast(word, dist.get_global_rank(group, 0), group)
    return word.cpu().numpy().tobytes().hex()


# A transport lives as long as its group: all ranks must agree whether one has to be made, whatever a rank's garbage
# collector has done.
_alive: weakref.WeakSet[ProcessGroupTransport] = weakref.WeakSet()
_transports: weakref.WeakKeyDictionary[Any, ProcessGroupTransport] = weakref.WeakKeyDictionary()


def transport(group: Any = None) -> ProcessGroupTransport:
    """Return the transport over a process group, for `Controller(transport=...)`. Each group has one transport.

    The first call for a group is collective, and blocks until all ranks of the group have connected.

    Args:
        group: a process group; None for the group of all ranks. The group's time limit applies to every wait.

    Raises:
        ValueError: torch.distributed is not initialized, or this process is not a member of the group.
        TypeError: `group` is not a process group.
        TimeoutError, ConnectionError: another rank does not make the call in time, or has ended.
    """
    _check_member(group)
    group = group or dist.group.WORLD
    found = _transports.get(group)
    if found is None:
        found = _transports[group] = ProcessGroupTransport(group)
    return found


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
