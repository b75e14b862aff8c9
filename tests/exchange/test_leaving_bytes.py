"""What leaves a host, and how it is worked out from what the meter counts."""

import pytest
import torch
from coded import HEADER_BYTES
from simulated import (
    BY_HOST,
    WORLDS,
    Worker,
    on_ranks,
    phases,
)

from hvd_dyncomp import Traffic
from hvd_dyncomp.commands.run.leaving import leaving
from hvd_dyncomp.exchange.topology import Topology


@WORLDS
@pytest.mark.parametrize("hierarchical", [None, False])
@pytest.mark.parametrize("bits", [0.25, 4, 8, 32])
def test_what_leaves_a_host_follows_from_what_is_sent(ranks, hosts, bits, hierarchical):
    def program(worker: Worker):
        for step in range(2):
            worker.step(worker.noise(step))
        return worker.quantizer.meter.total()

    sizes = {"a": 250_000, "b": 50_000}
    totals, world = on_ranks(ranks, program, sizes, bits, hosts=hosts, hierarchical=hierarchical)
    where = list(hosts or range(ranks))
    share = 2 * (len(set(where)) - 1) / len(set(where))
    for rank, total in enumerate(totals):
        own = [s for s in world.sent if s.rank == rank and s.kind == "sum"]
        sums = [s.tensor.nbytes for s in own]
        gathered = [s.tensor for s in world.sent if s.rank == rank and s.name.startswith("hvd_dyncomp.attach")]
        away = sum(len(each) // ranks * (ranks - where.count(where[rank])) for each in gathered)
        left = world.bytes_leaving[rank] - away + share * sum(sums) / where.count(where[rank])
        found, float32 = leaving(total, bits, Topology.of(where), rank, hierarchical=hierarchical)
        # Greetings and headers are counted as if they went where the codes go.
        assert found == pytest.approx(left, rel=0.02, abs=300) and found <= total.sent_bytes
        assert float32 == pytest.approx(2 * 4 * 300_000 * share / where.count(where[rank]))


def test_on_one_host_nothing_leaves():
    assert leaving(Traffic(100, 800), 4, Topology.of("aaa"), 1) == leaving(Traffic(), 4, Topology.of("a"), 0) == (0, 0)


def test_few_bytes_are_no_negative_ones():
    assert leaving(Traffic(1, 8e6), 4, Topology.of("aabb"), 1)[0] == 0


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("n_hosts", [2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_leaves_a_host_does_not_grow_with_its_workers(n_hosts, workers, bits):
    """Bits a value, of a host: 2 (H-1) / H of the level's, and of 16 for the scale of 128 values."""
    values, block, ranks = 512 * 480, 512, n_hosts * workers

    def program(worker: Worker) -> None:
        gradient = torch.randn(values, generator=torch.Generator().manual_seed(worker.transport.rank))
        worker.step({"a": gradient})

    hosts = [host for host in range(n_hosts) for _ in range(workers)]
    _, world = on_ranks(ranks, program, {"a": values}, bits, hosts=hosts, block_size=block)
    share = 2 * (n_hosts - 1) / n_hosts
    expected = share * (bits + 16 / 128)
    sections = workers * (1 if n_hosts == 2 else 2) * (n_hosts - 1)
    gathered = [s.tensor for s in world.sent if s.rank < workers and s.name.startswith("hvd_dyncomp.attach")]
    got = sum(world.bytes_leaving[:workers]) - sum(len(each) // ranks * (ranks - workers) for each in gathered)
    assert got * 8 / values == pytest.approx(expected, rel=0.03)
    assert got == pytest.approx(expected * values / 8 + sections * HEADER_BYTES, rel=1e-9)  # a header for each message


@BY_HOST
def test_owners_hand_on_the_bytes_that_they_got(ranks, hosts):
    """No third quantization: what a neighbour decodes is what was sent between hosts."""
    _, world = on_ranks(ranks, lambda worker: worker.step(worker.noise(0)), {"b": 500}, 4, hosts=hosts)
    between = phases(ranks, hosts)[-2]
    for place in range(2):
        peers = [rank for rank in range(ranks) if rank % 2 == place]
        # Of two, each sends it to the other only; of more, all get the same.
        copies = len(peers) if between == "gather" else 1
        own = [message[: len(message) // copies] for p in peers for message in world.messages(f".{between}", p)]
        for rank in peers:
            [handed] = world.messages(".local_gather", rank)
            assert torch.equal(handed, torch.cat(own).repeat(2))
