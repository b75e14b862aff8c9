"""Runs the files of checks in on_ranks/ on several ranks under torchrun."""

from pathlib import Path

import pytest
from torchrun import run_bodies

BODIES = Path(__file__).parent / "on_ranks"
FILES = ["exchange", "errors"]
JOBS = {3: ["exchange"], 4: FILES}
SECONDS = 300


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("ranks", JOBS)
def test_checks_hold_on_every_rank(ranks):
    """4 ranks are two replicas of two shards; 3 are replicas of one shard."""
    run_bodies([BODIES / f"test_{body}.py" for body in JOBS[ranks]], ranks, SECONDS)


def test_every_file_of_checks_is_run():
    assert {path.stem.removeprefix("test_") for path in BODIES.glob("test_*.py")} == set(FILES)
