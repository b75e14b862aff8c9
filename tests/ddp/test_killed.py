"""A rank that is killed, or fails, ends the job, whatever workers it leaves behind: its launcher sees to that."""

import re
import time
from pathlib import Path

import pytest
from torchrun import run_program

pytestmark = pytest.mark.promise("When a rank is killed or fails, its launcher ends the job within 30 s.")

SECONDS = 30


def end_of(ranks: int, program: str, *arguments: str) -> str:
    """The output of a program whose last rank says when it dies. That rank's death has ended all others in time."""
    done = run_program(ranks, Path(__file__).parents[1] / program, *arguments, seconds=120)
    now = time.time()
    assert done.returncode != 0, done.stdout
    [died] = re.findall(r"dies at (\S+)", done.stdout)
    assert now - float(died) < SECONDS, done.stdout
    return done.stdout


@pytest.mark.timeout(150)
@pytest.mark.parametrize(("ranks", "workers"), [(2, True), pytest.param(3, False, marks=pytest.mark.thorough)])
def test_a_killed_rank_ends_the_job(ranks, workers, tmp_path):
    said = end_of(ranks, "ddp/dies.py", "killed", *([str(tmp_path)] if workers else []))
    assert "Signal 9 (SIGKILL)" in said
    assert not workers or any(tmp_path.iterdir()), "there were no workers"


@pytest.mark.timeout(150)
@pytest.mark.parametrize("workers", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_a_rank_with_an_error_ends_the_job_and_says_why(workers, tmp_path):
    """Within a step, in a hook, with data on its way."""
    said = end_of(2, "ddp/dies.py", "fails", *([str(tmp_path)] if workers else []))
    assert "MemoryError: no room" in said


@pytest.mark.thorough
@pytest.mark.timeout(150)
@pytest.mark.promise("When a rank is killed or fails, its launcher ends the job within 30 s.")
def test_a_killed_rank_of_a_sharded_model_ends_the_job():
    """Neither its replica's ranks wait for it, in FSDP, nor the other replicas' ranks."""
    assert "Signal 9 (SIGKILL)" in end_of(4, "fsdp/dies.py")
