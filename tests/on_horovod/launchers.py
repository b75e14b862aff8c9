"""Runs a file of checks on several ranks under the real launchers, with a time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.launcher import run

BODIES = Path(__file__).parent / "on_ranks"
CHECK_SECONDS = 120.0  # that a check may take where several files share a job, unless it says so itself

_MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--tag-output"]
if os.geteuid() == 0:
    _MPIRUN.append("--allow-run-as-root")

LAUNCHERS = {
    "horovodrun": ["horovodrun"],
    "gloo": ["horovodrun", "--gloo"],
    "mpirun": _MPIRUN,
}


def run_limited(command: list[str], seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `command`; a deadlock is a failure when the time is over, and leaves no process behind."""
    # Four ranks on two cores: without yielding, ranks that wait take the time of those they wait for.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", **environment}
    try:
        return run(command, timeout=seconds, env=env)
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"no end after {seconds} s: {' '.join(command)}\n{expired.output}") from None


def run_bodies(
    bodies: Sequence[str],
    launcher: str,
    ranks: int,
    *,
    seconds: float,
    check_seconds: float = CHECK_SECONDS,
    **environment: str,
) -> str:
    """Runs the checks in some files of on_ranks/, one file after the other, with pytest, on every rank.

    Args:
        bodies: names of the files, without test_.
        launcher: one of `LAUNCHERS`.
        ranks: how many.
        seconds: that all of it may take.
        check_seconds: that a check may take which says nothing of it itself.
        environment: variables for all ranks.

    Returns:
        The output.

    Raises:
        AssertionError: a check failed on a rank, or the time was over.
    """
    # -P: the installed package, not the source tree that this may be called from. -s: what the checks print.
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-s", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    # By a thread: a rank that waits within Horovod hears of no signal. It says where the rank is, and ends it.
    pytest += [f"--timeout={check_seconds}", "--timeout-method=thread"]
    files = [str(BODIES / f"test_{body}.py") for body in bodies]
    done = run_limited([*LAUNCHERS[launcher], "-np", str(ranks), *pytest, *files], seconds, **environment)
    assert done.returncode == 0, done.stdout
    # Every rank must have run the checks; a launcher that started too few would pass otherwise.
    # (mpirun puts its tag into the middle of a line that it reads in two pieces.)
    assert re.sub(r"\[1,\d+\]<stdout>:", "", done.stdout).count(" passed") == ranks, done.stdout
    return done.stdout


def run_body(body: str, launcher: str, ranks: int, *, seconds: float = 240, **environment: str) -> str:
    """Runs the checks in one file, each of which may take all of the time."""
    return run_bodies([body], launcher, ranks, seconds=seconds, check_seconds=seconds, **environment)
