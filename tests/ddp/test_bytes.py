"""What leaves a host under torchrun is what the level says; its interface's counter is the judge."""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.launcher import run
from netlab.hosts import hosts, why_not

pytestmark = pytest.mark.promise("A host sends as many bytes as the level says.")

PROGRAM = Path(__file__).with_name("sends.py")
LEVELS = (0.25, 1, 4, 8)
VALUES = 2 * 2**22
SECONDS = 100


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize(
    ("kind", "workers"),
    [
        pytest.param("ddp", 1, marks=pytest.mark.thorough),
        ("ddp", 2),
        pytest.param("fsdp", 2, marks=pytest.mark.thorough),
    ],
)
def test_a_host_sends_what_the_level_says_and_the_meter_counts(kind, workers):
    """Two hosts: the level's bits a value, and 0.15 for scales, headers and what TCP/IP adds.

    With FSDP2 each host has all values, in shards, and nothing but their gradients leaves it.
    """
    # A link without a rate drops packets when the receiving core is busy, and what is sent again is counted again.
    with hosts(2, "1gbit", workers) as lab:
        start = ["torch.distributed.run", "--nnodes=2", f"--nproc-per-node={workers}"]
        start += [f"--master-addr={lab.addresses[0]}", "--master-port=29400"]
        program = ["--no-python", sys.executable, "-P", str(PROGRAM), kind, ",".join(map(str, LEVELS))]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}

        def on(host: int) -> str:
            command = lab.on_host(host, [sys.executable, "-m", *start, f"--node-rank={host}", *program])
            done = run(command, timeout=SECONDS, env=env)
            assert done.returncode == 0, done.stdout
            return done.stdout

        with ThreadPoolExecutor() as pool:
            said = "".join(pool.map(on, range(2)))
    reports = [line.partition("REPORTS ")[2] for line in said.splitlines() if "REPORTS " in line]
    found = [rank for report in reports for rank in json.loads(report)]
    assert len(found) == 2 * workers * len(LEVELS), said
    for bits in LEVELS:
        for host in ("0", "1"):
            ranks = [each for each in found if (each["bits"], each["host"]) == (bits, host)]
            sent, counted = min(rank["sent"] for rank in ranks), sum(rank["counted"] for rank in ranks)
            assert bits <= 8 * sent / VALUES <= 1.03 * (bits + 0.15)
            assert counted == pytest.approx(sent, rel=0.03)
