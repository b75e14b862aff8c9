"""Runs the files of checks in on_ranks/ on several ranks under torchrun."""

from pathlib import Path

import pytest
from torchrun import run_bodies

BODIES = Path(__file__).parent / "on_ranks"
JOBS = {
    "3x1": (3, ["backend", "exchange", "per_rank"], {}),  # replicas of one shard
    "2x2": (4, ["backend", "exchange", "per_rank", "errors"], {}),
    "2x2 as NCCL": (4, ["hybrid", "errors"], {"HVD_DYNCOMP_TEST_BACKEND": "as-nccl"}),
}
SECONDS = 300


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize(
    "job", ["2x2", *(pytest.param(job, marks=pytest.mark.thorough) for job in JOBS if job != "2x2")]
)
def test_checks_hold_on_every_rank(job):
    ranks, files, environment = JOBS[job]
    run_bodies([BODIES / f"test_{body}.py" for body in files], ranks, SECONDS, **environment)


def test_every_file_of_checks_is_run():
    run = {body for _, files, _ in JOBS.values() for body in files}
    assert {path.stem.removeprefix("test_") for path in BODIES.glob("test_*.py")} == run
