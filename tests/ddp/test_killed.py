"""A rank that dies ends the job: nobody waits for it, nor for the workers that it leaves behind."""

from pathlib import Path

import pytest
from torchrun import run_program


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("ranks", "workers"), [(2, True), (3, False)])
def test_a_killed_rank_ends_the_job(ranks, workers, tmp_path):
    arguments = [str(tmp_path)] if workers else []
    done = run_program(ranks, Path(__file__).with_name("dies.py"), *arguments, seconds=120)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stdout, done.stdout
    assert f"in step 3: the connection to rank {ranks - 1} was lost" in done.stdout, done.stdout
