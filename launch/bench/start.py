"""Starts the benchmarks' workers, on this host or on hosts of the lab, and says under what they run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import launcher
from common.errors import RunError
from hvd_dyncomp.transport import mpi_settings
from netlab.hosts import hosts

_LAUNCH = Path(__file__).parents[1]
_TIMEOUT = 3600.0


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """What every method runs under."""
    return {
        "HOROVOD_CYCLE_TIME": f"{args.cycle_time:g}",
        # Methods times tensors is more than the 1,024 names that Horovod remembers the negotiation of.
        "HOROVOD_CACHE_CAPACITY": "16384",
        "OMP_NUM_THREADS": "1",
        **mpi_settings.DEFAULTS,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # Gloo warns about addresses without names
    }


def worker(module: str, spec: Mapping[str, Any]) -> list[str]:
    """The command line of a module of this folder that is told what to do in JSON."""
    # -P: the package that is installed, not the source tree that this may be called from.
    return [sys.executable, "-P", "-m", f"bench.{module}", json.dumps(spec)]


def on_this_host(program: Sequence[str], workers: int, by: str) -> list[str]:
    """The command line that runs a Python program on so many workers of this host.

    Args:
        program: its interpreter is this one.
        workers: how many.
        by: one of `netlab.hosts.LAUNCHERS`.
    """
    if by == "mpirun":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(workers), *program]
    return launcher.horovodrun(workers, program[1:], "--gloo" if by == "gloo" else "--mpi")


class Place(NamedTuple):
    """Where workers run: the command line of a Python program on all of them, and the bytes that each host has sent."""

    command: Callable[[Sequence[str]], list[str]]
    counters: Callable[[], list[int]]


@contextlib.contextmanager
def place(size: int, workers: int, by: str, rate: str = "none") -> Iterator[Place]:
    """So many hosts of so many workers each, brought up for as long as needed; a single one is this host, uncounted.

    Raises:
        RunError: the network cannot be made.
    """
    if size == 1:
        yield Place(lambda program: on_this_host(program, workers, by), list)
        return
    with hosts(size, rate, workers) as lab:
        yield Place(lambda program: lab.command(program, launcher=by), lab.counters)


def start(command: Sequence[str], env: Mapping[str, str], called: str = "the benchmark's worker") -> None:
    """Run a command to its end, with more in its environment.

    Raises:
        RunError: it failed.
        subprocess.TimeoutExpired: it took longer than an hour.
    """
    path = os.pathsep.join(filter(None, (str(_LAUNCH), os.environ.get("PYTHONPATH"))))
    ended = launcher.run(command, timeout=_TIMEOUT, output=sys.stderr, env={**os.environ, "PYTHONPATH": path, **env})
    if ended.returncode:
        raise RunError(f"{called} ended with status {ended.returncode}; what it said is above")
