"""A rank is killed: the others end, and a restart goes on as if nothing had happened."""

import random
import signal
import time
from pathlib import Path

import psutil
import pytest

from common.launcher import horovodrun, run
from killed import POINTS
from runs import HOSTS, PROGRAM, RELEASE, assert_same_checkpoints, metrics, train

pytestmark = pytest.mark.promise(
    "When a rank is killed or fails, its launcher ends the job within 30 s.",
    "A restarted run equals the uninterrupted run bit for bit.",
)

KILLED = str(Path(__file__).with_name("killed.py"))
# Seconds from a rank's death to the end of the job. Launchers notice at once; a busy machine takes its time to end.
LIMIT = 30.0

# A call of each point at which the first two epochs, with their checkpoints, are over. An epoch has 4 steps with two
# workers and 3 with three, some 20 gradients a step, and one bucket.
CALLS = {
    "before the exchange": 200,
    "before it has read the handshake": 10,
    "with its message on the way": 10,
    "after the exchange": 200,
    "in Controller.step": 3,
    "while it writes a checkpoint": 5,
    "between the files of a checkpoint": 3,
}
CALLS_OF_THREE = {
    "with its message on the way": 8,
    "before it has reduced its shard": 8,
    "before it has the gathered shards": 8,
}
# Two steps an epoch.
CALLS_OF_HOSTS = {
    "before it has its host's sum": 5,
    "before it has its neighbours' sections": 5,
}


def killed_run(
    folder: Path, rank: int, point: str, call: int, *options: str, workers: int = 2, hosts: str = ""
) -> None:
    death = [str(rank), point, str(call), *([hosts] if hosts else [])]
    program = [KILLED, *death, "--", *RELEASE, "--output-dir", str(folder)]
    ended = run(horovodrun(len(hosts) or workers, program, *options), timeout=120)
    assert ended.returncode != 0, ended.stdout
    assert not (folder / "summary.json").exists(), "the run came to its end"


def assert_goes_on(folder: Path, whole: Path, how: str = "resumed after", workers: int = 2, hosts: str = "") -> None:
    said = train(*RELEASE, "--output-dir", str(folder), "--resume", workers=workers, hosts=hosts)
    assert how in said
    assert metrics(folder) == metrics(whole)
    assert_same_checkpoints(folder, whole)


@pytest.mark.parametrize(
    ("point", "rank", "options"),
    [
        ("with its message on the way", 1, ("--gloo",)),
        ("in Controller.step", 1, ("--gloo",)),
        ("while it writes a checkpoint", 0, ()),
    ],
)
def test_a_killed_rank_ends_the_job_and_loses_nothing(point, rank, options, whole, tmp_path):
    killed_run(tmp_path / "run", rank, point, CALLS[point], *options)
    assert_goes_on(tmp_path / "run", whole)


def test_a_rank_that_is_killed_before_the_first_checkpoint_is_whole(whole, tmp_path):
    killed_run(tmp_path / "run", 1, "while it writes a checkpoint", 1)
    assert_goes_on(tmp_path / "run", whole, "interrupted before its first checkpoint: from the beginning")


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("point", CALLS)
def test_at_every_point(point, rank, whole, tmp_path):
    killed_run(tmp_path / "run", rank, point, CALLS[point])
    assert_goes_on(tmp_path / "run", whole)


@pytest.fixture(scope="module")
def whole_of_three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole_of_three") / "run"
    with pytest.MonkeyPatch.context() as patch:
        # From three ranks on, Horovod's own sums depend on what happens to be fused.
        patch.setenv("HOROVOD_FUSION_THRESHOLD", "0")
        train(*RELEASE, "--output-dir", str(folder), workers=3)
        yield folder


@pytest.mark.soak
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("point", CALLS_OF_THREE)
def test_between_the_halves_of_an_exchange(point, rank, whole_of_three, tmp_path):
    killed_run(tmp_path / "run", rank, point, CALLS_OF_THREE[point], workers=3)
    assert_goes_on(tmp_path / "run", whole_of_three, workers=3)


@pytest.mark.parametrize(
    ("point", "rank"),
    [
        ("before it has its host's sum", 3),
        pytest.param("before it has its host's sum", 0, marks=pytest.mark.soak),
        pytest.param("before it has its neighbours' sections", 0, marks=pytest.mark.soak),
        pytest.param("before it has its neighbours' sections", 3, marks=pytest.mark.soak),
    ],
)
def test_within_and_between_hosts(point, rank, whole_of_hosts, tmp_path):
    killed_run(tmp_path / "run", rank, point, CALLS_OF_HOSTS[point], hosts=HOSTS)
    assert_goes_on(tmp_path / "run", whole_of_hosts, hosts=HOSTS)


def test_every_point_is_tried():
    assert {*CALLS, *CALLS_OF_THREE, *CALLS_OF_HOSTS} == {*POINTS}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_at_a_random_moment(seed, whole, tmp_path):
    """From outside, whatever the rank is doing."""
    folder, chance = tmp_path / "run", random.Random(seed)
    job = psutil.Popen(horovodrun(2, [PROGRAM, *RELEASE, "--output-dir", str(folder)]))
    after = folder / "checkpoints" / f"epoch-{chance.randint(1, 5):04}.pt"  # of 8, a tenth of a second each
    while not after.exists():
        assert job.poll() is None
        time.sleep(0.001)
    time.sleep(0.2 * chance.random())
    ranks = [child for child in job.children(recursive=True) if PROGRAM in child.cmdline() and not child.children()]
    chance.choice(ranks).send_signal(signal.SIGKILL)
    assert job.wait(timeout=LIMIT) != 0
    assert_goes_on(folder, whole)
