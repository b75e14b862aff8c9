"""A torch process group as the transport: asynchronous collectives of `torch.distributed`, in groups of their own.

Nothing here interferes with other traffic of the program's group, such as the collectives of `DistributedDataParallel`.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.checks import shown
from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.transport import base
from hvd_dyncomp.transport.background import Background
from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.collective_handle import CollectiveHandle, lost, message_of, timed_out
from hvd_dyncomp.transport.phase_groups import Groups, OrderedLauncher, close, close_at_exit, keep_for_ever

_BACKGROUND_SECONDS = 0.02  # between two rounds of background work, if no data arrives
_CLOSE_SECONDS = 10.0  # for messages in flight that other ranks wait for
_LAST_SECONDS = 0.01  # for one of torch's threads to return from the callback that reports arrived data
_WAIT_SECONDS = 1.0  # at a time: longer ones would keep a signal from its handler

_news = threading.Event()


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
        with _connecting():
            groups = Groups(group, name or f"hvd_dyncomp.{_token(group)}")
            self._all = groups.among(everyone, "all")
            self._sums = groups.among(everyone, "sums", gpus=True) if phases else self._all
            self._phase_groups = groups.by_phase(phases or {})
        self._name = groups.name
        self._launcher = OrderedLauncher(self._phase_groups)
        self.in_order = groups.nccl
        self._started: weakref.WeakSet[CollectiveHandle] = weakref.WeakSet()
        self._shared: ProcessGroupTransport = self
        self._end = weakref.finalize(self, _close, os.getpid(), groups.made, self._started)
        self._give_up_groups = functools.partial(close, groups.made, quiet=False)
        _alive.add(self)
        self._hosts: Sequence[str] = super().hosts() if phases is None else ()
        self._made = 0

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
    def local_size(self) -> int:
        return int(os.environ.get("LOCAL_WORLD_SIZE", self.hosts().count(self.host)))  # torchrun's

    def hosts(self) -> Sequence[str]:
        return self._shared._hosts

    def unsupported_reason(self, device: torch.device) -> str:
        return "" if device.type in ("cpu", "cuda") else "messages are sent from CPUs and from CUDA devices only"

    @property
    def shared(self) -> ProcessGroupTransport:
        return self._shared

    def for_exchanges(self, phases: Mapping[str, Sequence[int]]) -> ProcessGroupTransport:
        """As `base.Transport.for_exchanges`. Collective; blocks.

        Raises:
            LockstepError: the ranks' phases have different names. On all ranks.
        """
        everyone = gather_json(self, list(phases), "hvd_dyncomp.phases")
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
        made = ProcessGroupTransport(group, phases, f"{self._name}.{self._made}")
        made._shared = self
        return made

    def alltoall(
        self,
        tensor: torch.Tensor,
        ranks: Sequence[int],
        splits: list[int],
        arriving: list[int],
        name: str,
        out: torch.Tensor | None = None,
    ) -> CollectiveHandle:
        bucket, _, phase = name.rpartition(".")
        groups = self._phase_groups.get(phase)
        if groups is None:
            return self._begun(name, tensor, lambda: self._all.alltoall(tensor, splits, arriving, out))
        handle = self._new(name, tensor)
        # The call that starts the bucket before it may start it, on behalf of another GPU.
        here = (
            torch.cuda.stream(torch.cuda.current_stream(tensor.device)) if tensor.is_cuda else contextlib.nullcontext()
        )

        def start() -> tuple[list[Any], torch.Tensor]:
            with here:
                return groups.alltoall(tensor, splits, arriving, out)

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
        return self._begun(name, tensor, lambda: ([groups.sum(tensor)], tensor))

    def _new(self, name: str, tensor: torch.Tensor) -> CollectiveHandle:
        handle = CollectiveHandle(name, tensor, _news.set, in_order=self.in_order and tensor.is_cuda)
        self._started.add(handle)
        return handle

    def _begun(
        self, name: str, tensor: torch.Tensor, start: Callable[[], tuple[list[Any], torch.Tensor]]
    ) -> CollectiveHandle:
        handle = self._new(name, tensor)
        handle.start(start)
        return handle

    def poll(self, handle: CollectiveHandle) -> bool:
        return handle.over

    def wait(self, handle: CollectiveHandle) -> torch.Tensor:
        while not handle.wait(_WAIT_SECONDS):
            pass
        return handle.result()

    def in_background(self, work: Callable[[], bool]) -> None:
        _background.add(work)

    def abort(self) -> None:
        self._give_up_groups()
        self._started.clear()  # at exit nobody waits for them

    # No `yield_cpu`: Gloo's threads sleep until they are woken, and then run at once; a pause there cost 7 % of a step.


@contextlib.contextmanager
def _connecting() -> Iterator[None]:
    """Around code that waits for all ranks to connect.

    Raises:
        TimeoutError, ConnectionError: a rank does not join in time, or has ended.
    """
    try:
        yield
    except RuntimeError as error:  # torch's
        text = message_of(error)
        if not (timed_out(text) or lost(error)):
            raise
        raise (TimeoutError if timed_out(text) else ConnectionError)(
            f"not all ranks of the process group have called compress, transport or Averager: {text}"
        ) from error


def _close(process: int, groups: Iterable[Any], started: Iterable[CollectiveHandle]) -> None:
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
