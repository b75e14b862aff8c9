"""Network namespaces of this machine, joined by links: made, named by the process that owns them, and taken down."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress

import psutil

from netlab.shaping import INTERFACE


def why_not() -> str:
    """Why namespaces cannot be made here, in one sentence; "" if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need the command '{tool}' (Debian's package iproute2)"
    probe = f"{prefix_of(os.getpid())}probe"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode != 0:
        return f"network namespaces cannot be made here: {' '.join(tried.stderr.split())}"
    ip("netns", "delete", probe)
    return ""


def join(hosts: Sequence[str], addresses: Sequence[str], switch: str) -> None:
    """Make namespaces and links between them; each host gets an interface with its address.

    Args:
        hosts: names of the namespaces.
        addresses: of the hosts, in one /24 network.
        switch: name of another namespace, used unless there are two hosts, which need no bridge.

    Raises:
        subprocess.CalledProcessError: the kernel refuses.
    """
    for name in [*hosts, *([switch] if len(hosts) != 2 else [])]:
        ip("netns", "add", name)
    if len(hosts) == 2:
        first, second = hosts
        _veth(first, INTERFACE, second, INTERFACE)
    else:
        # The bridge lives in a namespace of its own, and the machine's own network is left as it is.
        ip("-n", switch, "link", "add", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for number, name in enumerate(hosts, start=1):
            _veth(name, INTERFACE, switch, f"port{number}")
            ip("-n", switch, "link", "set", f"port{number}", "master", "bridge", "up")
    for name, address in zip(hosts, addresses, strict=True):
        _set_congestion_control(name)
        # IPv6 would send its neighbour discovery beside the traffic that is counted.
        subprocess.run(["ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1"], check=False)
        ip("-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
        ip("-n", name, "link", "set", INTERFACE, "up")
        ip("-n", name, "link", "set", "lo", "up")


def _set_congestion_control(namespace: str) -> None:
    """Lets TCP fill a link, whatever the machine prefers: BBR took 11.5 s where these take 9.6 (25 million float32)."""
    for algorithm in ("cubic", "reno"):  # a namespace may be refused the first
        setting = f"net.ipv4.tcp_congestion_control={algorithm}"
        command = ["ip", "netns", "exec", namespace, "sysctl", "-qw", setting]
        if subprocess.run(command, capture_output=True).returncode == 0:
            return


def _veth(namespace: str, name: str, peer_namespace: str, peer_name: str) -> None:
    peer = ["peer", "name", peer_name, "netns", peer_namespace]
    ip("link", "add", name, "netns", namespace, "type", "veth", *peer)


def ip(*arguments: str) -> str:
    """What the command 'ip' says."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def prefix_of(pid: int) -> str:
    """What the names of a process's namespaces begin with; two labs at the same time do not meet."""
    return f"netlab-{pid}-"


def present() -> list[str]:
    """Names of all namespaces."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.strip()]


def sweep() -> None:
    """Take down what a process has left behind that was killed and could not do it."""
    owners = {match[1] for name in present() if (match := re.fullmatch(r"netlab-(\d+)-\w+", name))}
    for pid in owners:
        if not psutil.pid_exists(int(pid)):
            take_down(prefix_of(int(pid)))


def take_down(prefix: str) -> None:
    """Delete all namespaces whose names begin so, with every process in them."""
    for name in [name for name in present() if name.startswith(prefix)]:
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout.split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        # Its interface goes with a namespace, and the other end of the pair with the interface.
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)
