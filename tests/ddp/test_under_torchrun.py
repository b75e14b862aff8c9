"""Runs the files of checks in on_ranks/ on several ranks under torchrun; a job takes long to start."""

from pathlib import Path

import pytest
from torchrun import run_bodies

BODIES = Path(__file__).parent / "on_ranks"

FILES = [
    *("contract", "transport", "agreement", "exchange", "runs", "parted_replicas"),
    *("devices", "layouts", "copies", "averager", "scaler", "compiled", "nested", "calls", "momentum"),
    *("per_rank", "waited"),
    "final_errors",  # last: a thread of Gloo's may spin after an error
]
TWO_HOSTS = {"HVD_DYNCOMP_TEST_RANKS_PER_HOST": "2"}
AS_NCCL = {"HVD_DYNCOMP_TEST_BACKEND": "as-nccl"}
JOBS = {
    "2": (2, FILES, {}),
    # In other files it does not matter how many ranks there are.
    "3": (3, ["contract", "agreement", "exchange", "runs", "averager", "momentum", "per_rank", "final_errors"], {}),
    "2x2": (4, ["exchange", "averager"], TWO_HOSTS),
    "2 as NCCL": (2, ["nccl", "exchange"], AS_NCCL),
}
SECONDS = 300


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("job", ["2", *(pytest.param(job, marks=pytest.mark.thorough) for job in JOBS if job != "2")])
def test_checks_hold_on_every_rank(job):
    ranks, files, environment = JOBS[job]
    run_bodies([BODIES / f"test_{body}.py" for body in files], ranks, SECONDS, **environment)


def test_every_file_of_checks_is_run():
    run = {body for _, files, _ in JOBS.values() for body in files}
    assert {path.stem.removeprefix("test_") for path in BODIES.glob("test_*.py")} == run
