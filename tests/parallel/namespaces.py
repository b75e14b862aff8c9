"""Two hosts on one machine: network namespaces joined by a veth pair. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NAMES = ("hvd-dyncomp-a", "hvd-dyncomp-b")


def why_not() -> str:
    """Why namespaces cannot be made here; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command 'ip' (Debian's package iproute2)"
    probe = subprocess.run(["ip", "netns", "add", "hvd-dyncomp-probe"], capture_output=True, text=True)
    if probe.returncode != 0:
        return f"network namespaces cannot be made here: {probe.stderr.strip()}"
    _ip("netns", "delete", "hvd-dyncomp-probe")
    return ""


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@contextmanager
def two_hosts(directory: Path) -> Iterator[list[str]]:
    """Yields the beginning of a command line that starts one process in each of two namespaces with mpirun.

    The interface is called eth0 in both. Everything is taken down at the end, also after an error.
    """
    a, b = NAMES
    # Open MPI calls this in place of ssh, with the name of the host and the command to run there.
    agent = directory / "agent"
    agent.write_text('#!/bin/sh\nhost=$1\nshift\nexec ip netns exec "$host" sh -c "$*"\n')
    agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        _ip("link", "add", "eth0", "netns", a, "type", "veth", "peer", "name", "eth0", "netns", b)
        for number, name in enumerate(NAMES, start=1):
            _ip("-n", name, "address", "add", f"10.234.0.{number}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        only_eth0 = ["--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0"]
        yield [
            *["ip", "netns", "exec", a, "mpirun", "--allow-run-as-root", "--mca", "plm_rsh_agent", str(agent)],
            *["--host", f"{a},{b}", "--bind-to", "none", "--mca", "btl", "tcp,self", *only_eth0],
        ]
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
