"""Runs files of checks, or a program, on several ranks under torchrun, with a time limit and without Horovod."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from common.launcher import run

CHECK_SECONDS = 60  # that a check may take, unless it says so itself

# -P, later: the installed package, not the source tree that this may be called from.
_WITHOUT_HOROVOD = "import sys; sys.modules['horovod'] = None; "
_PYTEST = _WITHOUT_HOROVOD + "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
_PROGRAM = _WITHOUT_HOROVOD + "import runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"


def torchrun(
    ranks: int, code: str, arguments: Sequence[str], seconds: float, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs Python code on several ranks of this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["--no-python", sys.executable, "-P", "-c", code, *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    try:
        return run(command, timeout=seconds, env=env)
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"no end after {seconds} s: {' '.join(command)}\n{expired.output}") from None


def run_program(
    ranks: int, path: Path, *arguments: str, seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program."""
    return torchrun(ranks, _PROGRAM, [str(path), *arguments], seconds, **environment)


def run_bodies(files: Sequence[Path], ranks: int, seconds: float, **environment: str) -> None:
    """Runs the checks in some files, one file after the other, with pytest, on every rank.

    Raises:
        AssertionError: a check failed on a rank, or the time was over.
    """
    options = ["-q", "-s", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    options += [f"--timeout={CHECK_SECONDS}", "--timeout-method=thread"]
    done = torchrun(ranks, _PYTEST, [*options, *map(str, files)], seconds, **environment)
    assert done.returncode == 0, done.stdout
    # Every rank must have run the checks; a launcher that started too few would pass otherwise.
    assert done.stdout.count(" passed") == ranks, done.stdout
