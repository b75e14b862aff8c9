"""What MPI's collectives send, by which algorithm, as Open MPI 4.1 chooses among them.

Read from its source (coll_tuned_decision_fixed.c, coll_base_*.c), and confirmed by what the interfaces of two hosts of
1 to 8 workers counted (`tests/launch/test_costs.py` has the figures). Ranks lie host by host, as many on each.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Hosts(NamedTuple):
    """So many hosts of so many workers each."""

    number: int
    workers: int

    @property
    def ranks(self) -> int:
        return self.number * self.workers


class Transfer(NamedTuple):
    """What collectives do.

    Attributes:
        leaving: bytes that leave each host.
        staying: bytes that each worker hands to others on its host.
        far: messages that a worker sends one after the other, in rounds in which some worker's goes to another host.
        near: messages in other rounds.
        calls: number of collectives.
    """

    leaving: float = 0.0
    staying: float = 0.0
    far: float = 0.0
    near: float = 0.0
    calls: float = 1.0

    def __add__(self, other: tuple) -> Transfer:  # type: ignore[override]  # of a tuple
        return Transfer(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, number: float) -> Transfer:
        """The same so many times."""
        return Transfer(*(number * part for part in self))


def allreduce(nbytes: float, hosts: Hosts) -> Transfer:
    """Rabenseifner's: halves with the nearest rank first, so that only the last rounds leave a host.

    For numbers of hosts or workers that are no powers of two a good approximation only.
    """
    far, near = _rounds(hosts.number), _rounds(hosts.workers)
    leaving = 2 * nbytes * (hosts.number - 1) / hosts.number
    everything = 2 * nbytes * (hosts.ranks - 1) / hosts.ranks
    return Transfer(leaving, everything - leaving / hosts.workers, 2 * far, 2 * near)


def alltoall(nbytes: float, far: int, near: int, hosts: Hosts) -> Transfer:
    """Every worker sends `nbytes` bytes to each of `far` workers on other hosts and `near` on its own.

    Horovod tells everyone before how much will come.
    """
    told = _splits(hosts)
    return told + Transfer(hosts.workers * far * nbytes, near * nbytes, *_sent(far, near, hosts))


def _sent(far: int, near: int, hosts: Hosts) -> tuple[float, float]:
    if in_turns(hosts.ranks):
        return hosts.ranks - hosts.workers, hosts.workers - 1
    return far, near


def in_turns(ranks: int) -> bool:
    """Whether alltoallv sends a message to every rank in turn, also to those that get nothing."""
    return ranks < 4 or 64 <= ranks < 128 or 256 <= ranks < 1024 or ranks >= 8192


def _splits(hosts: Hosts) -> Transfer:
    if hosts.ranks < 16:
        return Transfer(far=hosts.ranks - hosts.workers, near=hosts.workers - 1, calls=0)
    return _in_rounds(_rounds(hosts.ranks), hosts)._replace(calls=0)


def allgather(nbytes: float, hosts: Hosts) -> Transfer:
    """Every worker's `nbytes` bytes go to all others."""
    algorithm = _BY_NAME[_allgather_algorithm(nbytes, hosts.ranks)]
    crossing, rounds = algorithm(hosts)
    everything = (hosts.ranks - 1) * nbytes
    return rounds._replace(leaving=crossing * nbytes, staying=max(0.0, everything - crossing * nbytes / hosts.workers))


# Ranks below; bytes of each below, and the algorithm.
_CHOICE: tuple[tuple[float, tuple[tuple[float, str], ...]], ...] = (
    (3, ((math.inf, "ring"),)),
    (8, ((4096, "neighbour"), (8192, "ring"), (16384, "neighbour"), (262144, "bruck"), (math.inf, "neighbour"))),
    (16, ((math.inf, "bruck"),)),
    (32, ((262144, "bruck"), (math.inf, "ring"))),
    (64, ((8192, "bruck"), (math.inf, "ring"))),
    (128, ((4096, "bruck"), (math.inf, "ring"))),
    (256, ((1024, "bruck"), (65536, "neighbour"), (math.inf, "ring"))),
    (512, ((1024, "bruck"), (math.inf, "ring"))),
    (1024, ((4096, "bruck"), (1048576, "neighbour"), (math.inf, "ring"))),
    (math.inf, ((4096, "bruck"), (math.inf, "neighbour"))),
)


def _allgather_algorithm(nbytes: float, ranks: int) -> str:
    sizes = next(sizes for below, sizes in _CHOICE if ranks < below)
    name = next(name for below, name in sizes if nbytes < below)
    return "ring" if name == "neighbour" and ranks % 2 else name


# Each returns how many workers' bytes leave a host, and the rounds.


def _ring(hosts: Hosts) -> tuple[float, Transfer]:
    return (hosts.ranks - 1) * (hosts.number > 1), _in_rounds(hosts.ranks - 1, hosts)


def _bruck(hosts: Hosts) -> tuple[float, Transfer]:
    crossing, distance = 0, 1
    while distance < hosts.ranks:
        whole = min(distance, hosts.ranks - distance)
        crossing += min(hosts.workers, whole) * whole  # so many of a host's workers send to others
        distance *= 2
    return crossing * (hosts.number > 1), _in_rounds(_rounds(hosts.ranks), hosts)


def _neighbour(hosts: Hosts) -> tuple[float, Transfer]:
    # Ranks 2i and 2i + 1 exchange what they have got last, then 2i + 1 and 2i + 2, and so on.
    rounds = hosts.ranks // 2
    even, odd = [1 if turn == 0 else 2 for turn in range(0, rounds, 2)], [2] * (rounds // 2)
    if hosts.number == 1:
        return 0, Transfer(near=rounds)
    if hosts.workers % 2:  # a host has pairs of either kind across its borders
        return sum(even) + sum(odd), Transfer(far=rounds)
    return 2 * sum(odd), Transfer(far=len(odd), near=len(even))


_BY_NAME = {"ring": _ring, "bruck": _bruck, "neighbour": _neighbour}


def _in_rounds(rounds: float, hosts: Hosts) -> Transfer:
    return Transfer(far=rounds) if hosts.number > 1 else Transfer(near=rounds)


def _rounds(ranks: int) -> int:
    return math.ceil(math.log2(ranks))
