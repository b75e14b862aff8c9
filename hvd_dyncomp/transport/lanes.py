"""Process groups in which collectives start in the same order on all ranks, as torch matches them.

Whoever starts collectives gives each a name, `SOMETHING.PHASE`, and starts the first phase of all things in the same
order on all ranks. Their later phases become due in an order that differs between ranks. So each phase has groups of
its own, and there a thing waits until those before it have started.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hvd_dyncomp.torch_names import check_names
from hvd_dyncomp.transport.sockets import Sockets, connections, keep_from_children, new_sockets, shut, that_belong_to

_POLL_SECONDS = 0.01


class Lane(NamedTuple):
    """Where the collectives of one phase run.

    Attributes:
        place: this rank's among those that take part.
        groups: Gloo's, one; or, for two ranks, one for what each of them sends.
        nccl: NCCL's communicator of these ranks, for tensors on GPUs; None if Gloo sends these, too.
    """

    place: int
    groups: tuple[Any, ...]
    nccl: Any = None

    def alltoall(
        self, tensor: torch.Tensor, splits: Sequence[int], arriving: Sequence[int], room: torch.Tensor | None = None
    ) -> tuple[list[Any], torch.Tensor]:
        """Start sending `splits[i]` bytes of a uint8 vector to the i-th rank, from which `arriving[i]` bytes come.

        Between two ranks these are two broadcasts, and each rank starts to receive first. In Gloo's alltoall the rank
        that comes later sends first. The other one may not send before it has heard that it may, and hears that only
        behind what is sent: the time of a message is lost whenever the link was idle.

        Returns:
            What is under way, and the vector that receives: `room` if there is one.
        """
        received = tensor.new_empty(sum(arriving)) if room is None else room
        if len(self.groups) == 1 or self._for(tensor) is self.nccl:
            return [self._for(tensor).alltoall_base(received, tensor, list(arriving), list(splits))], received
        other = 1 - self.place
        rooms, parts = received.split(list(arriving)), tensor.split(list(splits))
        rooms[self.place].copy_(parts[self.place])
        both = ((other, rooms[other]), (self.place, parts[other]))
        return [self.groups[root].broadcast(part, root) for root, part in both if len(part)], received

    def sum(self, tensor: torch.Tensor) -> Any:
        """Start adding up a tensor in its place. Returns what is under way."""
        return self._for(tensor).allreduce([tensor])

    def _for(self, tensor: torch.Tensor) -> Any:
        return self.nccl if self.nccl is not None and tensor.is_cuda else self.groups[0]


class Turns:
    """Starts collectives of several phases, each in the order in which their first phases have started.

    Args:
        phases: names of the phases, in the order in which one thing passes them.
    """

    def __init__(self, phases: Iterable[str]) -> None:
        self._phases = list(phases)
        self._numbers: dict[str, int] = {}  # of the latest first phase of each thing
        self._count = 0
        self._next = dict.fromkeys(self._phases, 0)
        self._early: dict[str, dict[int, Callable[[], None]]] = {phase: {} for phase in self._phases}
        self._lock = threading.Lock()

    def take(self, thing: str, phase: str, start: Callable[[], None]) -> None:
        """Call `start` when it is its turn: now, or in a later call of this."""
        with self._lock:
            if phase == self._phases[0]:
                self._numbers[thing] = self._count
                self._count += 1
            early = self._early[phase]
            early[self._numbers[thing]] = start
            while (due := early.pop(self._next[phase], None)) is not None:
                self._next[phase] += 1
                due()


class Groups:
    """Makes groups of some of a process group's ranks. Every call is collective among these ranks, and blocks.

    They are torch's backends themselves. `torch.distributed.new_group` would need all ranks of the job, or else give a
    group the name of an earlier one, whose addresses it would then find.

    Args:
        group: whose ranks, and whose time limit.
        name: of what it makes: the same on all ranks, and in the whole job that of nothing else.

    Attributes:
        name: see above.
        limit: of every wait.
        nccl: whether NCCL sends tensors on GPUs.
        made: all groups, and their sockets: what has appeared while each was made, until `keep_sockets`.
        doubtful: whether more has appeared than a group's own.
    """

    def __init__(self, group: Any, name: str) -> None:
        check_names(group, ("_get_backend", "_device_types"))
        check_names(dist.distributed_c10d, ("_get_default_store",))
        self._rank, self.name = dist.get_rank(group), name
        backends = [group._get_backend(device) for device in group._device_types]
        limits = [backend.options._timeout for backend in backends if hasattr(backend, "options")]
        self.limit: timedelta = min(limits, default=timedelta(minutes=30))
        self.nccl = "cuda:nccl" in dist.get_backend_config(group)
        self.made: dict[Any, Sockets] = {}
        self.doubtful = False
        self._communicators: dict[tuple[int, ...], Any] = {}
        _until_next.clear()

    def lane(self, ranks: Sequence[int], name: str, *, gpus: bool = False) -> Lane:
        """A lane for some ranks, among them this one.

        Args:
            gpus: whether it also sends tensors on GPUs.
        """
        return Lane(ranks.index(self._rank), (self._new_gloo(ranks, name),), self._nccl_of(ranks) if gpus else None)

    def lanes(self, phases: Mapping[str, Sequence[int]]) -> dict[str, Lane]:
        """A lane for each phase, among the ranks that it names."""
        return {
            phase: Lane(
                ranks.index(self._rank),
                tuple(self._new_gloo(ranks, f"{phase}.{ranks}.{i}") for i in range(2 if len(ranks) == 2 else 1)),
                self._nccl_of(ranks),
            )
            for phase, ranks in phases.items()
        }

    def _store(self, name: str) -> Any:
        return dist.PrefixStore(f"{self.name}.{name}", dist.distributed_c10d._get_default_store())

    def _new_gloo(self, ranks: Sequence[int], name: str) -> Any:
        with new_sockets() as sockets:
            made = dist.ProcessGroupGloo(self._store(f"{name}.cpu"), ranks.index(self._rank), len(ranks), self.limit)
        self.made[made] = sockets
        # One connection to each of the others, and one that listens.
        self.doubtful = self.doubtful or len(sockets) != len(ranks)
        return made

    @property
    def connections(self) -> list[str]:
        """Of all that has appeared while the groups were made, as both ends know them."""
        return sorted(set().union(*map(connections, self.made.values())))

    def keep_sockets(self, everyone: Sequence[Sequence[str]] | None) -> None:
        """Keep the groups' sockets from this process's children.

        Args:
            everyone: `connections` of each rank; None if only those of the groups have appeared on all of them.
        """
        twice = Counter(itertools.chain(*everyone)) if everyone is not None else Counter()
        for group, sockets in self.made.items():
            if everyone is not None and len(sockets) != group.size():
                between_two = {one for name, one in connections(sockets).items() if twice[name] == 2}
                # Fewer, if addresses are translated on the way: then all count as the group's.
                if len(between_two) >= group.size() - 1:
                    sockets.intersection_update(that_belong_to(between_two, sockets))
            keep_from_children(sockets)

    def _nccl_of(self, ranks: Sequence[int]) -> Any:
        """The communicator of some ranks, one for all lanes: its collectives run in the order in which they started.

        Several communicators of the same ranks would run their kernels at the same time: these wait for the other ranks
        while they occupy the GPU, and each communicator takes GPU memory. All ranks start all collectives of tensors on
        GPUs in one order (`Transport.in_order`), so one is enough. Making it blocks nobody: the ranks connect in their
        first collective.
        """
        if not self.nccl:
            return None
        ranks = tuple(ranks)
        if ranks not in self._communicators:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.limit
            made = dist.ProcessGroupNCCL(self._store(f"{ranks}.cuda"), ranks.index(self._rank), len(ranks), options)
            self.made[made] = set()
            self._communicators[ranks] = made
        return self._communicators[ranks]


def leave(groups: Mapping[Any, Sockets], *, quiet: bool) -> None:
    """Leave groups. Ranks that wait for this one then get an error.

    Args:
        groups: with their sockets.
        quiet: whether nothing is in flight; otherwise what is ends with an error, on both sides.
    """
    of_torch = isinstance(threading.current_thread(), threading._DummyThread)  # which Python has not started
    for group, sockets in groups.items():
        gloo = isinstance(group, dist.ProcessGroupGloo)
        if not quiet:
            shut(sockets)
            with contextlib.suppress(Exception):
                group.abort()
        if gloo and not quiet:
            _keep_for_ever(group)
        elif quiet and not gloo:
            _until_exit[group] = sockets
        elif of_torch:
            _until_next.append(group)


def _keep_for_ever(group: Any) -> None:
    """Have a group of Gloo's never be deleted, not even when Python exits: that may take as long as its time limit.

    It would wait for what is in flight, and that may not end, though its connections have. Gloo reads nothing more from
    a rank once something has come for a receive that is over, such as one that another rank's end has ended. So it
    does not see the end of that connection, and its thread does not sleep any more.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def leave_at_exit(seconds: float) -> None:
    """Delete what threads have left. Leave NCCL's groups, when the GPU has done what is queued, or after a while."""
    _until_next.clear()
    if not _until_exit:
        return
    with contextlib.suppress(Exception):  # a GPU that has failed may raise in any call
        done, until = torch.cuda.Event(), time.monotonic() + seconds
        done.record()
        while not done.query() and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    leave(_until_exit, quiet=False)


# NCCL's: nobody knows what other ranks still have to do with what is queued on a GPU, and torch aborts that when it
# deletes a group.
_until_exit: dict[Any, Sockets] = {}

# Those that a thread of torch's has left, until others are made or Python exits. It may be the group's own, which would
# wait for itself when it deletes it: Python collects garbage in any thread that it is called from.
_until_next: list[Any] = []
