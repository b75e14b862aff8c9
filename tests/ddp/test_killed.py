"""A rank that dies ends the job: nobody waits for it, nor for the workers that it leaves behind."""

import re
from pathlib import Path

import pytest
from torchrun import run_program

pytestmark = pytest.mark.promise(
    "When a rank is killed, the job ends: with Horovod within 60 s, otherwise when its DataLoader workers have ended."
)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("ranks", "workers"), [(2, True), (3, False)])
def test_a_killed_rank_ends_the_job(ranks, workers, tmp_path):
    arguments = [str(tmp_path)] if workers else []
    done = run_program(ranks, Path(__file__).with_name("dies.py"), *arguments, seconds=120)
    assert done.returncode != 0
    assert "Signal 9 (SIGKILL)" in done.stdout, done.stdout
    said = re.findall(r"rank (\d) in step 3 after (\d+) s: \S+: the connection to a rank was lost: .*why", done.stdout)
    assert said and all(int(rank) < ranks - 1 and int(seconds) < 5 for rank, seconds in said), done.stdout
