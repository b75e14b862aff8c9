"""Which ranks share a host, and who reduces which blocks: all ranks come to the same conclusion."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp.exchange.topology import Topology, flat, hierarchical


@st.composite
def placements(draw) -> list[int]:
    """By rank, its host: hosts of equally many workers, anyhow placed."""
    hosts, workers = draw(st.integers(2, 5)), draw(st.integers(2, 5))
    return draw(st.permutations([host for host in range(hosts) for _ in range(workers)]))


def test_hosts_are_in_the_order_of_their_first_ranks():
    topology = Topology.of(["b", "a", "b", "c", "a"])
    assert topology.hosts == ((0, 2), (1, 4), (3,)) and topology.size == 5
    assert topology.host_of(2) == (0, 2) and topology.host_of(3) == (3,)
    assert Topology.one_rank_per_host(3).hosts == ((0,), (1,), (2,))


@pytest.mark.parametrize(
    ("names", "two_level", "uneven"),
    [
        ("aabb", True, False),
        ("abab", True, False),
        ("aabbcc", True, False),
        ("a", False, False),
        ("aaa", False, False),
        ("abc", False, False),
        ("aab", False, True),
        ("abbcc", False, True),
    ],
)
def test_two_levels_need_hosts_of_several_workers_equally_many(names, two_level, uneven):
    assert Topology.of(names).two_level == two_level and Topology.of(names).uneven == uneven


@settings(deadline=None)
@given(st.integers(0, 60), placements())
def test_every_block_is_reduced_once_by_each_host(blocks, names):
    topology = Topology.of(names)
    views = [hierarchical(blocks, rank, topology) for rank in range(topology.size)]
    sections = views[0].sections
    assert all(view.sections == sections for view in views), "ranks disagree about who reduces what"
    assert len(sections) == len(topology.hosts[0]) and views[0].hierarchical
    covered = [block for section in sections for block in range(section.first, section.first + section.blocks)]
    assert covered == list(range(blocks))
    assert max(section.blocks for section in sections) <= min(section.blocks for section in sections) + 1
    for section in sections:
        assert list(section.ranks) == sorted(section.ranks)
        assert {topology.hosts.index(topology.host_of(rank)) for rank in section.ranks} == set(
            range(len(topology.hosts))
        )
        assert len(section.ranks) == len(topology.hosts), "a host has two ranks in it"
        blocks_of = [block for first, count in section.shards for block in range(first, first + count)]
        assert blocks_of == list(range(section.first, section.first + section.blocks))
        assert len(section.shards) == len(section.ranks)
        assert section.sharded == (len(section.ranks) > 2)
    for rank, view in enumerate(views):
        assert rank in sections[view.own].ranks
        assert view.host_ranks == topology.host_of(rank)
        assert [views[neighbour].own for neighbour in view.host_ranks] == list(range(len(sections)))


@given(st.integers(0, 60), st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_flat_all_ranks_reduce_all_blocks(blocks, names):
    topology = Topology.of(names)
    for rank in range(topology.size):
        view = flat(blocks, rank, topology)
        [section] = view.sections
        assert section == (0, blocks, tuple(range(topology.size))) and view.own == 0 and not view.hierarchical
        assert view.host_ranks == topology.host_of(rank)


def test_a_flat_arrangement_knows_the_neighbours():
    together = flat(13, 5, Topology.of([rank // 6 for rank in range(12)]))
    apart = flat(13, 5, Topology.one_rank_per_host(12))
    assert together.sections == apart.sections
    assert together.host_ranks == tuple(range(6)) and apart.host_ranks == (5,)
