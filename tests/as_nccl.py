"""Has tensors on CPUs travel as those on GPUs do over NCCL, and checks what NCCL counts on.

NCCL matches the collectives of a communicator by their order, and a rank does not wait for one that it has started.
Here Gloo carries them, and whatever uses a result blocks until it is there.
"""

from __future__ import annotations

import itertools
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hvd_dyncomp.exchange.streams import Streams
from hvd_dyncomp.transport.phase_groups import Groups, PhaseGroup
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport


class Started:
    """The collectives that this rank has started, in their order.

    Attributes:
        next_name: of the communicator that is made next.
        aborted: whether this rank has aborted a communicator: it may then have started fewer than others.
    """

    def __init__(self) -> None:
        self.next_name, self.aborted = "", False
        self._all: list[tuple[str, list[int], int, list[int], list[int]]] = []

    def add(self, name: str, ranks: list[int], to: list[int], arriving: list[int]) -> None:
        self._all.append((name, ranks, dist.get_rank(), to, arriving))

    def check(self) -> None:
        """Check that any two ranks have started the collectives of both in the same order. Collective.

        Raises:
            AssertionError: they have not, or one expects another length than the other sends.
        """
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (self._all, self.aborted))
        aborted, everyone = any(each for _, each in everyone), [started for started, _ in everyone]
        self._all, self.aborted = [], False
        for one, other in itertools.combinations(range(len(everyone)), 2):
            pairs = [[each for each in everyone[rank] if {one, other} <= set(each[1])] for rank in (one, other)]
            common = min(map(len, pairs)) if aborted else None
            pairs = [each[:common] for each in pairs]
            assert [name for name, *_ in pairs[0]] == [name for name, *_ in pairs[1]], "other orders"
            for (name, ranks, _, to, _), (*_, arriving) in zip(*pairs, strict=True):
                sent, expected = to[ranks.index(other)], arriving[ranks.index(one)]
                assert sent == expected, f"{name}: rank {one} sends {sent} bytes, rank {other} expects {expected}"


started = Started()


class Communicator:
    """Stands in for `dist.ProcessGroupNCCL`."""

    class Options:
        _timeout: timedelta

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, options._timeout)
        self._name = started.next_name
        own = [0] * size
        own[rank] = dist.get_rank() + 1
        total = torch.tensor(own)
        self._gloo.allreduce([total]).wait()
        self._ranks = [number - 1 for number in total.tolist()]

    def size(self) -> int:
        return len(self._ranks)

    def alltoall_base(self, received: Any, sent: Any, arriving: list[int], splits: list[int]) -> Any:
        started.add(self._name, self._ranks, splits, arriving)
        return self._gloo.alltoall_base(received, sent, arriving, splits)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        every = [tensors[0].nbytes] * len(self._ranks)
        started.add(self._name, self._ranks, every, every)
        return self._gloo.allreduce(tensors)

    def abort(self) -> None:
        """As with NCCL, works of other ranks that wait for this one go on."""
        started.aborted = True


def install(patch: pytest.MonkeyPatch) -> None:
    """Have all transports that are made from now on work so."""
    make, store, new = Groups.__init__, Groups._store, ProcessGroupTransport._new

    def with_nccl(groups, *args):
        make(groups, *args)
        groups.nccl = True

    def named(groups, name):
        started.next_name = f"{groups.name}.{name}"
        return store(groups, name)

    def queued(transport, name, tensor):
        works = new(transport, name, tensor)
        works._in_order = name.rpartition(".")[2] in transport._phase_groups or name.endswith(".uncompressed")
        return works

    patch.setattr(dist, "ProcessGroupNCCL", Communicator, raising=False)
    patch.setattr(Groups, "__init__", with_nccl)
    patch.setattr(Groups, "_store", named)
    patch.setattr(ProcessGroupTransport, "_new", queued)
    patch.setattr(PhaseGroup, "_for", lambda lane, tensor: lane.groups[0] if lane.nccl is None else lane.nccl)
    patch.setattr(Streams, "late", True)
    patch.setattr(torch.cuda, "current_stream", lambda device=None: None)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
