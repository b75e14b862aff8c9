"""Runs the files of checks in on_ranks/ on several ranks under torchrun; a job takes long to start."""

from pathlib import Path

import pytest
from torchrun import run_bodies

BODIES = Path(__file__).parent / "on_ranks"

FILES = [
    *("transport", "agreement", "exchange", "runs", "parted_replicas"),
    *("devices", "layouts", "interrupted", "copies", "averager", "scaler", "compiled", "nested", "calls", "momentum"),
]
JOBS = {
    2: FILES,
    3: [
        "agreement",
        "exchange",
        "runs",
        "interrupted",
        "averager",
        "momentum",
    ],  # elsewhere it does not matter how many they are
    4: ["exchange", "runs", "averager"],
}
SECONDS = 300


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("ranks", JOBS)
def test_checks_hold_on_every_rank(ranks):
    two_hosts = {"HVD_DYNCOMP_TEST_RANKS_PER_HOST": "2"} if ranks == 4 else {}
    run_bodies([BODIES / f"test_{body}.py" for body in JOBS[ranks]], ranks, SECONDS, **two_hosts)


def test_every_file_of_checks_is_run():
    assert {path.stem.removeprefix("test_") for path in BODIES.glob("test_*.py")} == set(FILES)
