"""A rank that dies ends the job: nobody waits for it."""

from pathlib import Path

import pytest
from torchrun import run_program


@pytest.mark.timeout(150)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_killed_rank_ends_the_job(ranks):
    done = run_program(ranks, Path(__file__).with_name("dies.py"), seconds=120)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stdout, done.stdout
    assert f"in step 3: the connection to rank {ranks - 1} was lost" in done.stdout, done.stdout
