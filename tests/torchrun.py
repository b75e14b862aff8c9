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


def command(ranks: int, code: str, arguments: Sequence[str]) -> list[str]:
    """The command line that runs Python code on several ranks of this machine."""
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [*start, "--no-python", sys.executable, "-P", "-c", code, *arguments]


def bodies(files: Sequence[Path], ranks: int, *options: str, seconds: float = CHECK_SECONDS) -> list[str]:
    """The command line that runs the checks in some files, one file after the other, with pytest, on every rank.

    Args:
        options: of pytest.
        seconds: that a check may take, unless it says so itself.
    """
    quiet = ["-q", "-s", "-x", "-p", "no:cacheprovider", "-W", "ignore"]
    limit = [f"--timeout={seconds}", "--timeout-method=thread"]
    return command(ranks, _PYTEST, [*quiet, *limit, *options, *map(str, files)])


def _run(line: Sequence[str], seconds: float, **environment: str) -> subprocess.CompletedProcess[str]:
    try:
        return run(line, timeout=seconds, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"no end after {seconds} s: {' '.join(line)}\n{expired.output}") from None


def run_program(
    ranks: int, path: Path, *arguments: str, seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs a program."""
    return _run(command(ranks, _PROGRAM, [str(path), *arguments]), seconds, **environment)


def run_bodies(files: Sequence[Path], ranks: int, seconds: float, **environment: str) -> None:
    """Runs the checks in some files, as `bodies` has it.

    Raises:
        AssertionError: a check failed on a rank, or the time was over.
    """
    done = _run(bodies(files, ranks), seconds, **environment)
    assert done.returncode == 0, done.stdout
    # Every rank must have run the checks; a launcher that started too few would pass otherwise.
    assert done.stdout.count(" passed") == ranks, done.stdout
