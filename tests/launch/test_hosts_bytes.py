"""What leaves a host is what the level says, however many workers it has; its interface's counter is the judge."""

import json
import os
import sys
from pathlib import Path

import pytest

from common.launcher import run
from hvd_dyncomp.transport import mpi_settings
from netlab.hosts import hosts, why_not

BODY = str(Path(__file__).parents[1] / "on_horovod" / "on_ranks" / "wire_bytes.py")
LEVELS = (1, 4, 8)
STEPS = 3
# One bucket each. What Horovod's ranks tell each other in a step is the same for both sizes: 4 to 10 kB a host over
# MPI, 20 kB over Gloo. The difference between them is what values cost.
SMALL, VALUES = 8192, 2_000_000

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")


@pytest.fixture(
    scope="module",
    params=[pytest.param((2, 4, "mpirun"), marks=pytest.mark.soak), (2, 2, "gloo")],
    ids=lambda layout: "{}x{}-{}".format(*layout),
)
def measured(request) -> tuple[int, dict[tuple[int, int], list[tuple[float, float]]]]:
    """The number of hosts; and for each size and level, of every host, bytes of a step by interface and by meters."""
    size, workers, launcher = request.param
    # A link without a rate drops packets when the receiving core is busy, and what is sent again is counted again.
    with hosts(size, "1gbit", workers) as lab:
        arguments = [f"{SMALL},{VALUES}", str(STEPS), ",".join(map(str, LEVELS))]
        command = lab.command([sys.executable, "-P", BODY, *arguments], launcher=launcher)
        # Ranks compare notes in every cycle, which the interface counts as well, more so on a slow machine.
        settings = {"HOROVOD_CYCLE_TIME": "100", "OMP_NUM_THREADS": "1", **mpi_settings.DEFAULTS}
        done = run(command, timeout=300, env={**os.environ, **settings})
    assert done.returncode == 0, done.stdout
    found = {}
    for line in done.stdout.splitlines():
        _, marked, reports = line.partition("REPORTS ")
        if marked:
            ranks = json.loads(reports)
            assert len(ranks) == size * workers
            found[ranks[0]["values"], ranks[0]["bits"]] = [of_host(ranks, host) for host in range(size)]
    assert len(found) == 2 * len(LEVELS), done.stdout
    return size, found


def of_host(ranks: list[dict], host: int) -> tuple[float, float]:
    """What the interface has sent, which all workers of the host read, and what its workers say has left the host."""
    workers = [rank for rank in ranks if rank["host"] == host]
    assert sorted(rank["local_rank"] for rank in workers) == list(range(len(workers)))
    return min(rank["sent"] for rank in workers), sum(rank["leaving"] for rank in workers)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", LEVELS)
def test_a_host_sends_what_the_level_says(measured, bits):
    """2(H-1)/H times the bits a value, and 0.2 for scales (0.125), headers and all that Horovod and TCP/IP add."""
    size, found = measured
    factor = 2 * (size - 1) / size
    for sent, _ in found[VALUES, bits]:
        assert factor * bits <= 8 * sent / VALUES <= 1.03 * factor * (bits + 0.2)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", LEVELS)
def test_the_meters_of_a_host_equal_its_interface_within_3_percent(measured, bits):
    _, found = measured
    for (sent, counted), (sent_small, counted_small) in zip(found[VALUES, bits], found[SMALL, bits], strict=True):
        assert counted - counted_small == pytest.approx(sent - sent_small, rel=0.03)
