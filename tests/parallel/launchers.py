"""Runs a file of checks on several ranks under the real launchers, with a time limit."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from common.launcher import run

BODIES = Path(__file__).parent / "bodies"

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


def run_body(body: str, launcher: str, ranks: int, *, seconds: float = 240, **environment: str) -> str:
    """Runs the checks in bodies/`body`.py, with pytest, on every rank; returns the output.

    Raises:
        AssertionError: a check failed on a rank, or the time was over.
    """
    # -P: the installed package, not the source tree that this may be called from. -s: what the checks print.
    pytest = [sys.executable, "-P", "-m", "pytest", "-q", "-s", "-x", f"--timeout={seconds}"]
    pytest += ["-p", "no:cacheprovider", "-W", "ignore"]
    done = run_limited(
        [*LAUNCHERS[launcher], "-np", str(ranks), *pytest, str(BODIES / f"{body}.py")], seconds, **environment
    )
    assert done.returncode == 0, done.stdout
    # Every rank must have run the checks; a launcher that started too few would pass otherwise.
    # (mpirun puts its tag into the middle of a line that it reads in two pieces.)
    assert re.sub(r"\[1,\d+\]<stdout>:", "", done.stdout).count(" passed") == ranks, done.stdout
    return done.stdout
