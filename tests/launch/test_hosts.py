"""train_resnet.py on several hosts, for which this one machine passes: going on."""

import shutil
from pathlib import Path

import pytest

from runs import HOSTS, RELEASE, assert_same_runs, metrics, train

pytestmark = [
    pytest.mark.promise(
        "A restarted run equals the uninterrupted run bit for bit.", "A run may continue with workers on other hosts."
    ),
    pytest.mark.thorough,
]


@pytest.fixture
def interrupted_on_hosts(whole_of_hosts: Path, tmp_path: Path) -> Path:
    """The same run with six of its eight epochs."""
    folder = tmp_path / "run"
    train(*RELEASE, "--output-dir", str(folder), "--stop-after", "6", hosts=HOSTS)
    return folder


def test_resume_equals_no_interruption(interrupted_on_hosts: Path, whole_of_hosts: Path) -> None:
    folder = interrupted_on_hosts
    assert "resumed after 6 of 8 epochs" in train(*RELEASE, "--output-dir", str(folder), "--resume", hosts=HOSTS)
    assert_same_runs(folder, whole_of_hosts)


@pytest.mark.parametrize("hosts", ["aaab", "ab"])
def test_a_run_goes_on_where_its_workers_are_others(
    hosts: str, interrupted_on_hosts: Path, whole_of_hosts: Path, tmp_path: Path
) -> None:
    """On hosts of different numbers of workers, and with half of them."""
    folder = Path(shutil.copytree(interrupted_on_hosts, tmp_path / "other"))
    assert "resumed after 6 of 8 epochs" in train(*RELEASE, "--output-dir", str(folder), "--resume", hosts=hosts)
    lines, before = metrics(folder), metrics(whole_of_hosts)
    assert lines[:6] == before[:6]
    assert lines[-1]["train_loss"] == pytest.approx(before[-1]["train_loss"], rel=0.3)
