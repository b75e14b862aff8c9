"""Process groups in which collectives start in the same order on all ranks, because torch matches them by order.

A collective's name is `BUCKET.PHASE`. The first phases of all buckets start in the same order on all ranks, but their
later phases become due in an order that differs between ranks. So each phase has groups of its own, in which a bucket
waits until the buckets before it have started.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_dyncomp.torch_names import check_names

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.01
_LIMIT = timedelta(minutes=30)


class PhaseGroup(NamedTuple):
    """The groups in which the collectives of one phase run.

    Attributes:
        place: the index of this rank among the ranks that take part.
        groups: Gloo groups: one, or for two ranks one for the messages of each.
        nccl: the NCCL communicator of these ranks, for tensors on GPUs; None if Gloo sends these, too.
    """

    place: int
    groups: tuple[Any, ...]
    nccl: Any = None

    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int], arriving: Sequence[int], out: torch.Tensor | None = None
    ) -> tuple[list[Any], torch.Tensor]:
        """Start sending `splits[i]` bytes of a uint8 vector to the i-th rank, and receiving `arriving[i]` from it.

        Between two ranks these are two broadcasts, and each rank starts to receive first. In Gloo's alltoall a sender
        waits for the receiver's notice, which queues behind the receiver's own message: the ranks send one after the
        other, although the link could carry both messages at once.

        Returns:
            torch's works, and the vector that receives: `out` if it is given.
        """
        received = tensor.new_empty(sum(arriving)) if out is None else out
        if len(self.groups) == 1 or self._for(tensor) is self.nccl:
            return [self._for(tensor).alltoall_base(received, tensor, list(arriving), list(splits))], received
        other = 1 - self.place
        outs, parts = received.split(list(arriving)), tensor.split(list(splits))
        outs[self.place].copy_(parts[self.place])
        both = ((other, outs[other]), (self.place, parts[other]))
        return [self.groups[root].broadcast(part, root) for root, part in both if len(part)], received

    def sum(self, tensor: torch.Tensor) -> Any:
        """Start summing a tensor in place. Returns torch's work."""
        return self._for(tensor).allreduce([tensor])

    def _for(self, tensor: torch.Tensor) -> Any:
        return self.nccl if self.nccl is not None and tensor.is_cuda else self.groups[0]


class OrderedLauncher:
    """Starts the collectives of each phase in the order in which the first phases have started.

    Args:
        phases: names of the phases, in the order in which a bucket passes them.
    """

    def __init__(self, phases: Iterable[str]) -> None:
        self._phases = list(phases)
        self._numbers: dict[str, int] = {}  # of the latest first phase of each bucket
        self._count = 0
        self._next = dict.fromkeys(self._phases, 0)
        self._early: dict[str, dict[int, Callable[[], None]]] = {phase: {} for phase in self._phases}
        self._lock = threading.Lock()

    def enqueue(self, bucket: str, phase: str, start: Callable[[], None]) -> None:
        """Call `start` when it is the bucket's turn in a phase: now, or in a later call of this method."""
        with self._lock:
            if phase == self._phases[0]:
                self._numbers[bucket] = self._count
                self._count += 1
            early = self._early[phase]
            early[self._numbers[bucket]] = start
            while (due := early.pop(self._next[phase], None)) is not None:
                self._next[phase] += 1
                due()


def time_limit(backends: Iterable[Any], *, says: bool) -> timedelta:
    """The shortest time limit of some of torch's backends. Where none tells one, torch's own default.

    Args:
        says: whether to log a warning then.
    """
    options: list[Any] = [getattr(backend, "options", None) for backend in backends]
    limits = [each._timeout for each in options if hasattr(each, "_timeout")]
    if not limits and says:
        logger.warning(
            "this version of torch does not say which time limit the process group has, so a rank waits for the others "
            "for %d minutes",
            _LIMIT.total_seconds() // 60,
        )
    return min(limits, default=_LIMIT)


class Groups:
    """Makes groups of some ranks of a process group. Every call is collective among these ranks, and blocks.

    The groups are torch's backends, made directly. `torch.distributed.new_group` needs all ranks of the job, or may
    reuse the name of an earlier group, and with it that group's addresses in the store.

    Args:
        group: the process group, whose time limit applies.
        name: prefix in the job's store: equal on all ranks, and unique in the job.

    Attributes:
        name: see above.
        limit: time limit of every wait.
        nccl: whether NCCL sends tensors on GPUs.
        made: all groups.
    """

    def __init__(self, group: Any, name: str) -> None:
        check_names(group, ("_get_backend", "_device_types"))
        check_names(dist.distributed_c10d, ("_get_default_store",))
        self._rank, self.name = dist.get_rank(group), name
        self.limit = time_limit(
            [group._get_backend(device) for device in group._device_types], says=dist.get_rank() == 0
        )
        self.nccl = "cuda:nccl" in getattr(group, "config", dist.get_backend_config(group))  # `fsdp.backend`
        if self.nccl:
            check_names(dist, ("ProcessGroupNCCL",))
            check_names(dist.ProcessGroupNCCL.Options(), ("_timeout",))
        self.made: list[Any] = []
        self._communicators: dict[tuple[int, ...], Any] = {}
        _until_next.clear()

    def among(self, ranks: Sequence[int], name: str, *, gpus: bool = False) -> PhaseGroup:
        """A group of some ranks, among them this one.

        Args:
            gpus: whether it also sends tensors on GPUs.
        """
        return PhaseGroup(
            ranks.index(self._rank), (self._new_gloo(ranks, name),), self._nccl_of(ranks) if gpus else None
        )

    def by_phase(self, phases: Mapping[str, Sequence[int]]) -> dict[str, PhaseGroup]:
        """A group for each phase, of the ranks that take part in it."""
        return {
            phase: PhaseGroup(
                ranks.index(self._rank),
                tuple(self._new_gloo(ranks, f"{phase}.{ranks}.{i}") for i in range(2 if len(ranks) == 2 else 1)),
                self._nccl_of(ranks),
            )
            for phase, ranks in phases.items()
        }

    def _store(self, name: str) -> Any:
        return dist.PrefixStore(f"{self.name}.{name}", dist.distributed_c10d._get_default_store())

    def _new_gloo(self, ranks: Sequence[int], name: str) -> Any:
        made = dist.ProcessGroupGloo(self._store(f"{name}.cpu"), ranks.index(self._rank), len(ranks), self.limit)
        self.made.append(made)
        return made

    def _nccl_of(self, ranks: Sequence[int]) -> Any:
        """The one communicator of some ranks, which all phases share.

        Kernels of several communicators would wait for other ranks at the same time, while they occupy the GPU, and
        each communicator takes GPU memory. One is enough, because all ranks start all collectives of tensors on GPUs in
        one order (`Transport.in_order`). This call does not block: the ranks connect in their first collective.
        """
        if not self.nccl:
            return None
        ranks = tuple(ranks)
        if ranks not in self._communicators:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.limit
            made = dist.ProcessGroupNCCL(self._store(f"{ranks}.cuda"), ranks.index(self._rank), len(ranks), options)
            self.made.append(made)
            self._communicators[ranks] = made
        return self._communicators[ranks]


def close(groups: Iterable[Any], *, quiet: bool) -> None:
    """Leave groups. Ranks that wait for this rank then get an error, at the latest when this process ends.

    Args:
        groups: the groups.
        quiet: whether nothing is in flight.
    """
    of_torch = isinstance(threading.current_thread(), threading._DummyThread)  # a thread that torch has started
    for group in groups:
        gloo = isinstance(group, dist.ProcessGroupGloo)
        if not quiet and gloo:
            keep_for_ever(group)
        elif not quiet:
            with contextlib.suppress(Exception):
                group.abort()
        elif not gloo:
            _until_exit.append(group)
        elif of_torch:
            _until_next.append(group)


def keep_for_ever(group: Any) -> None:
    """Never delete a Gloo group, not even when Python exits: its destructor may block until the time limit.

    The destructor waits for collectives in flight, which end only when the other ranks take part in them, or end.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def close_at_exit(seconds: float) -> None:
    """Delete groups left on torch's threads. Leave NCCL's when the GPU has done all queued work, or after `seconds`."""
    _until_next.clear()
    if not _until_exit:
        return
    with contextlib.suppress(Exception):  # a GPU that has failed may raise in any call
        done, until = torch.cuda.Event(), time.monotonic() + seconds
        done.record()
        while not done.query() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    close(_until_exit, quiet=False)


# NCCL groups: torch aborts the work that is queued on a GPU when it deletes a group, and other ranks may need it.
_until_exit: list[Any] = []

# Groups whose last reference was dropped on one of torch's threads, because Python collects garbage on any thread. They
# are deleted when the next group is made: on that thread, which may be the group's own, the destructor would wait for
# itself.
_until_next: list[Any] = []
