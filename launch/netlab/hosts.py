"""Hosts that are network namespaces of this machine: brought up, reached, and taken down with all that runs on them.

Every host has one interface, called eth0, which serves all its workers. What leaves a host is held to its rate (tc's
token bucket); workers of one host talk over shared memory (Open MPI) or loopback (Gloo). Two hosts are joined by a veth
pair, more by a bridge. Needs root and iproute2. No ssh server is needed: where a launcher would call ssh, it finds a
script that enters the other host's namespace. torchrun calls none: everywhere.py starts one on every host.
"""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from common.errors import RunError
from common.launcher import TORCHRUN, horovodrun, torchrun
from netlab.namespaces import ip, join, prefix_of, present, sweep, take_down, why_not
from netlab.shaping import INTERFACE, bits_per_second, shape

__all__ = ["LAUNCHERS", "WITH_HOROVOD", "Lab", "hosts", "why_not"]

WITH_HOROVOD = ("mpirun", "horovodrun", "gloo")
LAUNCHERS = (*WITH_HOROVOD, TORCHRUN)
_EVERYWHERE = str(Path(__file__).with_name("everywhere.py"))
_PORT = 29400  # of torchrun's store
_SUBNET = "10.234.0"
_MOST_HOSTS = 64

# Stands in for ssh: "ssh [options] host command...". Hosts are named by their addresses, namespaces by the last number.
_AGENT = """#!/bin/sh
while getopts "o:p:i:l:xqnT" _; do :; done
shift $((OPTIND - 1))
host=$1
shift
while [ "${1#-}" != "$1" ]; do shift 2; done
exec ip netns exec "%s${host##*.}" unshare --uts sh -c "hostname $host && $*"
"""


class Lab:
    """Hosts that are up. Made by `hosts`.

    Attributes:
        size: how many.
        workers_per_host: ranks that `command` starts on each.
        addresses: IP address of each host; also its name.
    """

    def __init__(self, size: int, workers_per_host: int, prefix: str, directory: Path) -> None:
        self.size, self.workers_per_host = size, workers_per_host
        self.addresses = [f"{_SUBNET}.{number}" for number in range(1, size + 1)]
        self._namespaces = [f"{prefix}{number}" for number in range(1, size + 1)]
        self._directory = directory

    def on_host(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on the host of this number, from 0."""
        # Each host's name is its address, whatever looks it up: Horovod's Gloo, told to use eth0, looks up the name.
        # And hosts of the same name would be one to Open MPI, whose processes talk over shared memory.
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.addresses[number]]
        return ["ip", "netns", "exec", self._namespaces[number], *named, *command]

    def command(self, program: Sequence[str], *, launcher: str = "mpirun", discovery: Path | None = None) -> list[str]:
        """The command line that runs a program on every host. Ranks are placed host by host.

        Args:
            program: with its arguments.
            launcher: "mpirun", "horovodrun" (over MPI), "gloo" (horovodrun without MPI) or "torchrun", of which every
                host has one; when one of them fails, all are ended.
            discovery: with "gloo", a script that prints the hosts of the moment: an elastic job, from 1 rank to all.
        """
        if launcher == TORCHRUN:
            return [
                sys.executable,
                _EVERYWHERE,
                *(json.dumps(self._torchrun(host, program)) for host in range(self.size)),
            ]
        hosts = ",".join(f"{address}:{self.workers_per_host}" for address in self.addresses)
        workers = str(self.size * self.workers_per_host)
        if launcher == "mpirun":
            only = ["--mca", "btl", "vader,tcp,self", "--mca", "btl_tcp_if_include", INTERFACE]
            only += ["--mca", "oob_tcp_if_include", INTERFACE]
            start = ["mpirun", "--allow-run-as-root", "--bind-to", "none", "--host", hosts, *only]
        else:
            ranks = ["-np", workers, "-H", hosts]
            if discovery is not None:  # -np: so many ranks are waited for at first
                ranks = ["-np", "1", "--max-np", workers, "--host-discovery-script", str(discovery)]
            start = [_horovodrun(), *ranks, "--network-interfaces", INTERFACE]
            start += ["--gloo"] if launcher == "gloo" else ["--mpi", "--mpi-args=--oversubscribe"]
        # The agent is called ssh and comes first in PATH, for Open MPI and horovodrun alike.
        path = f"PATH={self._directory}{os.pathsep}{os.environ['PATH']}"
        return self.on_host(0, ["env", path, *start, *program])

    def _torchrun(self, host: int, program: Sequence[str]) -> list[str]:
        options = [f"--nnodes={self.size}", f"--node-rank={host}", f"--nproc-per-node={self.workers_per_host}"]
        options += [f"--master-addr={self.addresses[0]}", f"--master-port={_PORT}"]
        return self.on_host(host, ["env", f"GLOO_SOCKET_IFNAME={INTERFACE}", *torchrun(*options), *program])

    def set_rate(self, rate: str) -> None:
        """Hold what leaves every host to another rate, from now on; programs may be running.

        Raises:
            ValueError: it is not a rate.
        """
        for namespace in self._namespaces:
            shape(rate, ["-n", namespace])

    def counters(self) -> list[int]:
        """Bytes that each host's interface has sent since it was made."""
        shown = [ip("-n", name, "-s", "-j", "link", "show", INTERFACE) for name in self._namespaces]
        return [json.loads(text)[0]["stats64"]["tx"]["bytes"] for text in shown]


@contextmanager
def hosts(size: int = 2, rate: str = "none", workers_per_host: int = 1) -> Iterator[Lab]:
    """Bring hosts up; take them down at the end, with every process that is left on them, also after an error.

    Raises:
        RunError: there is no root, no iproute2, or the kernel refuses.
        ValueError: a bad number of hosts or of workers, or a bad rate.
    """
    bits_per_second(rate)
    if not 1 <= size <= _MOST_HOSTS:
        raise ValueError(f"hosts must be from 1 to {_MOST_HOSTS}, got {size}")
    if workers_per_host < 1:
        raise ValueError(f"workers_per_host must be at least 1, got {workers_per_host}")
    reason = why_not()
    if reason:
        raise RunError(reason)
    sweep()
    prefix = prefix_of(os.getpid())
    if any(name.startswith(prefix) for name in present()):
        raise RunError("this process has hosts up already")
    try:
        with tempfile.TemporaryDirectory(prefix="netlab-") as directory:
            lab = Lab(size, workers_per_host, prefix, Path(directory))
            agent = Path(directory, "ssh")
            agent.write_text(_AGENT % prefix)
            agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
            join(lab._namespaces, lab.addresses, f"{prefix}0")
            lab.set_rate(rate)
            yield lab
    except subprocess.CalledProcessError as error:
        raise RunError(f"{' '.join(map(str, error.cmd))}: {' '.join((error.stderr or '').split())}") from None
    finally:
        take_down(prefix)


def _horovodrun() -> str:
    return horovodrun(1, [])[0]


def come_down_on_signals() -> None:
    """Lets a program that is told to end take its hosts down first: signals become exceptions."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, _interrupted)


def _interrupted(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)
