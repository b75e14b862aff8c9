"""A rank that dies ends the job: neither its replica's ranks wait for it, in FSDP, nor the other replicas' ranks."""

import re
from pathlib import Path

import pytest
from torchrun import run_program

RANKS = 4
pytestmark = pytest.mark.promise(
    "When a rank is killed, the job ends: with Horovod within 60 s, otherwise when its DataLoader workers have ended."
)


@pytest.mark.timeout(150)
def test_a_killed_rank_ends_the_job():
    done = run_program(RANKS, Path(__file__).with_name("dies.py"), seconds=120)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stdout, done.stdout
    said = re.findall(r"rank (\d) in step 3 after (\d+) s: (\w+)\(", done.stdout)
    assert sorted(int(rank) for rank, *_ in said) == list(range(RANKS - 1)), done.stdout
    assert all(int(seconds) < 5 for _, seconds, _ in said), done.stdout
    assert "ConnectionError" in {kind for *_, kind in said}, done.stdout
