"""Starts the benchmarks' workers, on this host or on hosts of the lab, and says under what they run."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common import launcher
from common.errors import RunError
from hvd_dyncomp.transport import mpi_settings
from netlab.hosts import WITH_HOROVOD, Lab, hosts
from netlab.shaping import INTERFACE

_LAUNCH = Path(__file__).parents[1]
_TIMEOUT = 3600.0
_PORT = 29500


def environment_of(args: argparse.Namespace) -> dict[str, str]:
    """What every method runs under."""
    horovod = {
        "HOROVOD_CYCLE_TIME": f"{args.cycle_time:g}",
        # Methods times tensors is more than the 1,024 names that Horovod remembers the negotiation of.
        "HOROVOD_CACHE_CAPACITY": "16384",
        **mpi_settings.DEFAULTS,
    }
    return {
        **(horovod if args.launcher in WITH_HOROVOD else {}),
        "OMP_NUM_THREADS": "1",
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # Gloo warns about addresses without names
    }


def worker(part: str, spec: Mapping[str, Any]) -> list[str]:
    """The command line of a rank of a part, which is told what to do in JSON."""
    # -P: the package that is installed, not the source tree that this may be called from.
    return [sys.executable, "-P", "-m", "bench.worker", part, json.dumps(spec)]


def on_this_host(program: Sequence[str], workers: int, by: str) -> list[str]:
    """The command line that runs a Python program on so many workers of this host.

    Args:
        program: its interpreter is this one.
        workers: how many.
        by: one of `netlab.hosts.LAUNCHERS`.
    """
    if by == launcher.TORCHRUN:
        return [*launcher.torchrun("--standalone", f"--nproc-per-node={workers}"), *program]
    if by == "mpirun":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        return ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(workers), *program]
    return launcher.horovodrun(workers, program[1:], "--gloo" if by == "gloo" else "--mpi")


def for_torch(lab: Lab | None = None) -> dict[str, str]:
    """What torch's process group needs in the environment, beside Horovod's, on the hosts of a lab or on this one."""
    if lab is not None:
        return {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": lab.addresses[0], "MASTER_PORT": str(_PORT)}
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}


class Place(NamedTuple):
    """Where workers run: the command line of a Python program on all of them, the bytes that each host has sent, and
    what torch needs there.
    """

    command: Callable[[Sequence[str]], list[str]]
    counters: Callable[[], list[int]]
    environment: Mapping[str, str]


@contextlib.contextmanager
def place(size: int, workers: int, by: str, rate: str = "none") -> Iterator[Place]:
    """So many hosts of so many workers each, brought up for as long as needed; a single one is this host, uncounted.

    Raises:
        RunError: the network cannot be made.
    """
    if size == 1:
        yield Place(lambda program: on_this_host(program, workers, by), list, for_torch())
        return
    with hosts(size, rate, workers) as lab:
        yield Place(lambda program: lab.command(program, launcher=by), lab.counters, for_torch(lab))


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
