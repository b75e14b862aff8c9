"""A rank is killed: the others end, and a restart goes on as if nothing had happened."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from common.launcher import horovodrun, run
from killed import POINTS
from runs import HOSTS, PROGRAM, RELEASE, assert_same_runs, train

pytestmark = pytest.mark.promise(
    "When a rank is killed or fails, its launcher ends the job within 30 s.",
    "A restarted run equals the uninterrupted run bit for bit.",
)

KILLED = str(Path(__file__).with_name("killed.py"))
# Seconds from a rank's death to the end of the job. Launchers notice at once; a busy machine takes its time to end.
LIMIT = 30.0

# A call of each point at which the first two epochs, with their checkpoints, are over. An epoch has 4 steps with two
# workers and 2 with four, and some 20 gradients a step.
CALLS = {
    "before the exchange": 200,
    "after the exchange": 200,
    "in Controller.step": 3,
    "while it writes a checkpoint": 3,
}


def killed_run(folder: Path, rank: int, point: str, call: int, *options: str, hosts: str = "") -> None:
    death = [str(rank), point, str(call), *([hosts] if hosts else [])]
    program = [KILLED, *death, "--", *RELEASE, "--output-dir", str(folder)]
    ended = run(horovodrun(len(hosts) or 2, program, *options), timeout=120)
    assert ended.returncode != 0, ended.stdout
    assert not (folder / "summary.json").exists(), "the run came to its end"


def assert_goes_on(folder: Path, whole: Path, finished: int, hosts: str = "") -> None:
    said = train(*RELEASE, "--output-dir", str(folder), "--resume", hosts=hosts)
    assert (f"resumed after {finished} of 8 epochs" in said) == (finished > 0)
    assert_same_runs(folder, whole)


@pytest.mark.parametrize(
    ("point", "rank", "options"),
    [
        ("in Controller.step", 1, ("--gloo",)),
        ("while it writes a checkpoint", 0, ()),
        pytest.param("before the exchange", 0, (), marks=pytest.mark.soak),
        pytest.param("before the exchange", 1, ("--gloo",), marks=pytest.mark.soak),
        pytest.param("after the exchange", 0, ("--gloo",), marks=pytest.mark.soak),
        pytest.param("after the exchange", 1, (), marks=pytest.mark.soak),
    ],
)
def test_a_killed_rank_ends_the_job_and_loses_nothing(point, rank, options, whole, tmp_path):
    killed_run(tmp_path / "run", rank, point, CALLS[point], *options)
    assert_goes_on(tmp_path / "run", whole, finished=2)


@pytest.mark.thorough
def test_a_rank_that_is_killed_before_the_first_checkpoint_is_whole(whole, tmp_path):
    killed_run(tmp_path / "run", 0, "while it writes a checkpoint", 1)
    assert_goes_on(tmp_path / "run", whole, finished=0)


@pytest.mark.soak
def test_on_hosts_of_several_workers(whole_of_hosts, tmp_path):
    killed_run(tmp_path / "run", 3, "after the exchange", 100, hosts=HOSTS)
    assert_goes_on(tmp_path / "run", whole_of_hosts, finished=2, hosts=HOSTS)


def test_every_point_is_tried():
    assert CALLS.keys() == POINTS.keys()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_at_a_random_moment(seed, whole, tmp_path):
    """From outside, whatever the rank is doing."""
    folder, chance = tmp_path / "run", random.Random(seed)
    job = psutil.Popen(horovodrun(2, [PROGRAM, *RELEASE, "--output-dir", str(folder)]))
    while not (folder / "checkpoint.pt").exists():
        assert job.poll() is None
        time.sleep(0.001)
    time.sleep(0.4 * chance.random())  # of 7 epochs, a tenth of a second each
    ranks = [child for child in job.children(recursive=True) if PROGRAM in child.cmdline() and not child.children()]
    chance.choice(ranks).send_signal(signal.SIGKILL)
    assert job.wait(timeout=LIMIT) != 0
    train(*RELEASE, "--output-dir", str(folder), "--resume")
    assert_same_runs(folder, whole)
