"""Which ranks share a host, and which rank reduces which blocks of a bucket.

*Flat*: all ranks reduce all blocks. *Hierarchical*, if all hosts have equally many workers: the blocks are cut into as
many sections as a host has workers. The workers with the same place on their hosts reduce one section.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch

from hvd_dyncomp.exchange.coding import Span
from hvd_dyncomp.exchange.wire import Phase

MOST_BITS_OF_BFLOAT16 = 7


def dtype_within_host(bits: float) -> torch.dtype:
    """The dtype in which values travel to neighbours on the host, at a level."""
    return torch.bfloat16 if bits <= MOST_BITS_OF_BFLOAT16 else torch.float32


class Topology(NamedTuple):
    """The ranks of a group, by host.

    Attributes:
        hosts: each host's ranks, ascending; hosts in the order of their first ranks.
    """

    hosts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, names: Sequence[Hashable]) -> Topology:
        """The topology from every rank's name of its host."""
        hosts: dict[Hashable, list[int]] = {}
        for rank, name in enumerate(names):
            hosts.setdefault(name, []).append(rank)
        return cls(tuple(map(tuple, hosts.values())))

    @classmethod
    def one_rank_per_host(cls, size: int) -> Topology:
        """Every rank on a host of its own."""
        return cls.of(range(size))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return sum(map(len, self.hosts))

    @property
    def uneven(self) -> bool:
        """Whether hosts have different numbers of workers."""
        return len(set(map(len, self.hosts))) > 1

    @property
    def two_level(self) -> bool:
        """Whether gradients can travel within hosts first and then between them: all have equally many workers."""
        return len(self.hosts) > 1 and not self.uneven and len(self.hosts[0]) > 1

    def host_of(self, rank: int) -> tuple[int, ...]:
        """All ranks on this rank's host, with itself."""
        return next(host for host in self.hosts if rank in host)


def shard_bounds(blocks: int, world_size: int) -> list[int]:
    """First block of every rank's shard, and the end: `world_size + 1` numbers; shards differ by at most one block."""
    return [blocks * rank // world_size for rank in range(world_size + 1)]


class Section(NamedTuple):
    """Consecutive blocks of a bucket, and the ranks that reduce them.

    Attributes:
        first: the first of its blocks.
        blocks: number of blocks.
        ranks: ascending. Each reduces a shard; if there are two, each reduces the whole section.
    """

    first: int
    blocks: int
    ranks: tuple[int, ...]

    @property
    def sharded(self) -> bool:
        return len(self.ranks) > 2

    @property
    def span(self) -> Span:
        """All its blocks."""
        return Span(self.first, self.blocks)

    @property
    def shards(self) -> list[Span]:
        """The blocks of each rank's shard."""
        bounds = [self.first + bound for bound in shard_bounds(self.blocks, len(self.ranks))]
        return [Span(first, last - first) for first, last in itertools.pairwise(bounds)]


class Arrangement(NamedTuple):
    """How a bucket's blocks are divided, as one rank sees it.

    Attributes:
        sections: all of them, in order.
        own: index of the section that this rank helps to reduce.
        host_ranks: the ranks of its host, with itself; if hierarchical, in the order of the sections that they help to
            reduce.
    """

    sections: tuple[Section, ...]
    own: int
    host_ranks: tuple[int, ...]

    @property
    def hierarchical(self) -> bool:
        return len(self.sections) > 1


def flat(blocks: int, rank: int, topology: Topology) -> Arrangement:
    """All ranks reduce all blocks."""
    return Arrangement((Section(0, blocks, tuple(range(topology.size))),), 0, topology.host_of(rank))


def hierarchical(blocks: int, rank: int, topology: Topology) -> Arrangement:
    """A section for each worker of a host. Call it only for `two_level` topologies."""
    host_ranks = topology.host_of(rank)
    bounds = shard_bounds(blocks, len(host_ranks))
    sections = tuple(
        Section(bounds[place], bounds[place + 1] - bounds[place], tuple(sorted(host[place] for host in topology.hosts)))
        for place in range(len(host_ranks))
    )
    return Arrangement(sections, host_ranks.index(rank), host_ranks)


def phases(topology: Topology, rank: int, *, by_host: bool) -> dict[str, tuple[int, ...]]:
    """The ranks with which a rank exchanges in each phase of a bucket, by the phase's name and in order.

    Args:
        by_host: whether gradients travel within hosts first; only for a topology that is `two_level`.
    """
    arrangement = (hierarchical if by_host else flat)(0, rank, topology)
    section = arrangement.sections[arrangement.own]
    between = [Phase.SCATTER, Phase.GATHER] if section.sharded else [Phase.PAIR]
    among = dict.fromkeys(between, section.ranks)
    if by_host:
        host_ranks = arrangement.host_ranks
        among = {Phase.LOCAL_SCATTER: host_ranks, **among, Phase.LOCAL_GATHER: host_ranks}
    return {phase.name.lower(): ranks for phase, ranks in among.items()}
