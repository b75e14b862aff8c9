"""What leaves a host, and what stays on it."""

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

from hvd_dyncomp.exchange.wire import GREETING_BYTES

SIZES = {"a": 130, "b": 500, "small": 5}


@WORLDS
@pytest.mark.parametrize("bits", [4, 32])
def test_the_meter_tells_what_leaves_a_host(ranks, hosts, bits):
    def program(worker: Worker):
        for step in range(2):
            worker.step(worker.noise(step))
        worker.optimizer.step()  # reduces nothing new
        return worker.quantizer.meter.total()

    totals, world = on_ranks(ranks, program, SIZES, bits, hosts=hosts)
    where = list(hosts or range(ranks))
    share = 2 * (len(set(where)) - 1) / len(set(where))
    for rank, total in enumerate(totals):
        own = [s for s in world.sent if s.rank == rank and s.kind == "sum"]
        sums = [s.tensor.nbytes for s in own]
        gathered = [s.tensor for s in world.sent if s.rank == rank and s.name.startswith("hvd_dyncomp.attach")]
        away = sum(len(each) // ranks * (ranks - where.count(where[rank])) for each in gathered)
        leaving = world.bytes_leaving[rank] - away + share * sum(sums) / where.count(where[rank])
        assert total.leaving_bytes == pytest.approx(leaving)
        assert total.staying_bytes == pytest.approx(total.sent_bytes - leaving) and total.staying_bytes >= 0
        float32 = 3 * 4 * 635 * share / where.count(where[rank])
        assert total.float32_leaving_bytes == pytest.approx(float32)
        assert total.saved_fraction == pytest.approx(1 - leaving / float32)


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("n_hosts", [2, 3, 4])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_leaves_a_host_does_not_grow_with_its_workers(n_hosts, workers, bits):
    """Bits a value, of a host: 2 (H-1) / H of the level's, and of 16 for the scale of 128 values."""
    values, block, ranks = 512 * 480, 512, n_hosts * workers

    def program(worker: Worker) -> float:
        gradient = torch.randn(values, generator=torch.Generator().manual_seed(worker.transport.rank))
        worker.step({"a": gradient})
        return worker.quantizer.meter.total().leaving_bytes

    hosts = [host for host in range(n_hosts) for _ in range(workers)]
    leaving, _ = on_ranks(ranks, program, {"a": values}, bits, hosts=hosts, block_size=block)
    share = 2 * (n_hosts - 1) / n_hosts
    expected = share * (bits + 16 / 128)
    reduced = share * ranks * GREETING_BYTES  # and a header for each message
    sections = workers * (1 if n_hosts == 2 else 2) * (n_hosts - 1)
    got = sum(leaving[:workers])
    assert got * 8 / values == pytest.approx(expected, rel=0.03)
    assert got == pytest.approx(expected * values / 8 + reduced + sections * HEADER_BYTES, rel=1e-9)


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
