"""Starts programs on several workers from Python, and leaves nothing of them behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

TRAINER = Path(__file__).parents[1] / "train_resnet.py"  # what studies and benchmarks train with
TORCHRUN = "torchrun"  # how the launcher that does without Horovod is called
_GRACE = 10.0  # seconds between asking and killing


def horovodrun(workers: int, program: Sequence[str], *options: str) -> list[str]:
    """The command line that runs ``program`` under this interpreter on ``workers`` workers.

    Args:
        workers: number of ranks, all on this machine.
        program: path of a Python file and its arguments.
        options: of horovodrun itself, ``--gloo`` for example.

    Raises:
        FileNotFoundError: there is no horovodrun, neither beside this interpreter nor on the PATH.
    """
    beside = Path(sys.executable).with_name("horovodrun")
    found = str(beside) if beside.exists() else shutil.which("horovodrun")
    if found is None:
        raise FileNotFoundError("horovodrun is neither beside this Python nor on the PATH")
    return [found, *options, "-np", str(workers), sys.executable, *program]


def torchrun(*options: str) -> list[str]:
    """The command line, to be followed by a program and its arguments, that runs them on torchrun's workers.

    Args:
        options: of torchrun itself, ``--nproc-per-node=2`` for example.
    """
    return [sys.executable, "-P", "-m", "torch.distributed.run", *options, "--no-python"]


def run(
    command: Sequence[str],
    *,
    timeout: float,
    output: IO[str] | int = subprocess.PIPE,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and end it with all its descendants if that takes too long.

    Args:
        command: program and arguments; no shell is involved.
        timeout: seconds.
        output: where stdout and stderr go, together; by default they are returned in ``stdout``.
        env, cwd: as in subprocess; without `env`, Python's os.environ.

    Raises:
        subprocess.TimeoutExpired: after everything has been ended; its ``output`` is what was said until then.
    """
    # Passed explicitly: a process that has initialized MPI carries Open MPI's variables in the C library's environment,
    # which os.environ does not show and a child would inherit; mpirun then ends with status 1 and no word.
    env = dict(os.environ) if env is None else env
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, env=env, cwd=cwd
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired as expired:
        end(process.pid)
        said, _ = process.communicate()
        raise subprocess.TimeoutExpired(list(command), timeout, output=said) from expired
    except BaseException:  # an interrupt from the keyboard must not leave workers behind either
        end(process.pid)
        process.wait()
        raise
    return subprocess.CompletedProcess(list(command), process.returncode, said)


def end(pid: int) -> None:
    """End a process and all its descendants: ask first, kill after some seconds.

    Launchers put their workers into sessions of their own, so the process group alone would not reach them; and once
    the launcher is gone nobody knows whose children they were. They are listed before anything is ended.
    """
    try:
        root = psutil.Process(pid)
        family = [*root.children(recursive=True), root]
    except psutil.NoSuchProcess:
        return
    for signal in (psutil.Process.terminate, psutil.Process.kill):
        for process in family:
            try:
                signal(process)
            except psutil.NoSuchProcess:
                continue
        _, family = psutil.wait_procs(family, timeout=_GRACE)
