"""Runs a file of checks on several ranks under the real launchers, with a time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

BODIES = Path(__file__).parent / "bodies"

_MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "--tag-output"]
if os.geteuid() == 0:
    _MPIRUN.append("--allow-run-as-root")

LAUNCHERS = {
    "horovodrun": ["horovodrun"],
    "gloo": ["horovodrun", "--gloo"],
    "mpirun": _MPIRUN,
}


def run_limited(command: list[str], seconds: float, **environment: str) -> subprocess.CompletedProcess:
    """Runs `command` in a process group of its own, which is killed when the time is over: a deadlock is a failure."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"no end after {seconds} s: {' '.join(command)}\n{output}") from None
    return subprocess.CompletedProcess(command, process.returncode, output)


def run_body(body: str, launcher: str, ranks: int, *, seconds: float = 120) -> str:
    """Runs the checks in bodies/`body`.py, with pytest, on every rank; returns the output.

    Raises:
        AssertionError: a check failed on a rank, or the time was over.
    """
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    done = run_limited([*LAUNCHERS[launcher], "-np", str(ranks), *pytest, str(BODIES / f"{body}.py")], seconds)
    assert done.returncode == 0, done.stdout
    # Every rank must have run the checks; a launcher that started too few would pass otherwise.
    assert done.stdout.count(" passed") == ranks, done.stdout
    return done.stdout
