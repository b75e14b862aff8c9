"""Runs the files of checks in bodies/ on several ranks under torchrun; to start a job takes as long as many checks."""

from pathlib import Path

import pytest
from torchrun import run_bodies

BODIES = Path(__file__).parent / "bodies"

FILES = [
    *("transport", "agreement", "exchange", "runs", "parted"),
    *("devices", "layouts", "interrupted", "copies", "averager", "scaler", "compiled"),
]
JOBS = {
    2: FILES,
    3: [body for body in FILES if body not in ("scaler", "compiled")],  # minutes, in which the ranks do not matter
    4: ["exchange", "runs", "averager"],
}
SECONDS = 300


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("ranks", JOBS)
def test_checks_hold_on_every_rank(ranks):
    two_hosts = {"HVD_DYNCOMP_TEST_RANKS_PER_HOST": "2"} if ranks == 4 else {}
    run_bodies([BODIES / f"{body}.py" for body in JOBS[ranks]], ranks, SECONDS, **two_hosts)


def test_every_file_of_checks_is_run():
    files = {path.stem for path in BODIES.glob("*.py")} - {"conftest", "problem"}
    assert {body for bodies in JOBS.values() for body in bodies} == files
