"""The address at which other hosts reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from hvd_dyncomp.transport.forked import not_for_children

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")
_GLOBAL, _LINK_LOCAL = 0x00, 0x20


def announced() -> str:
    """The address of the interface that Gloo uses, or of the one that leads to rank 0.

    A name only if rank 0 is on this host and its name was given: for others it may stand for another address than here.

    Raises:
        ValueError: GLOO_SOCKET_IFNAME has no interface, or one without an address.
    """
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    master = os.environ.get("MASTER_ADDR")
    if interface:
        return _of(interface)
    if not master:
        return socket.gethostname()
    mine, there = _towards(master)
    return master if mine == there and master != "localhost" else mine


def listening(address: str, waiting: int) -> socket.socket:
    """A socket that listens on a free TCP port of an address that `announced` has returned.

    On all interfaces where it is a name.

    Args:
        waiting: number of connections that may wait to be accepted.
    """
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        family, _, _, _, there = found[0]  # with the interface of a link-local address
        return not_for_children(socket.create_server(there, family=family, backlog=waiting))
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return not_for_children(socket.create_server(("", 0), family=family, dualstack_ipv6=both, backlog=waiting))


def _towards(name: str) -> tuple[str, str]:
    """This host's address on the way to another host, and that host's."""
    error: OSError | None = None
    for family, _, _, _, there in socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(there)  # sends nothing
            except OSError as caught:  # as with IPv6 where only the name has it
                error = caught
                continue
            return probe.getsockname()[0], str(there[0])
    raise ValueError(f"MASTER_ADDR must be a host that this one can reach, got {name!r}: {error}")


def _of(interface: str) -> str:
    """The IPv4 address of a network interface; if it has none, its IPv6 address."""
    if interface not in [name for _, name in socket.if_nameindex()]:
        raise ValueError(f"GLOO_SOCKET_IFNAME must begin with a network interface of this host, got {interface!r}")
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        packed = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(packed[20:24])
    lines = _IPV6_ADDRESSES.read_text(encoding="ascii").splitlines() if _IPV6_ADDRESSES.exists() else []
    fields = [line.split() for line in lines]  # address, number, prefix, scope, flags, interface
    found = {int(scope, 16): address for address, _, _, scope, _, name in fields if name == interface}
    for scope, suffix in ((_GLOBAL, ""), (_LINK_LOCAL, f"%{interface}")):
        if scope in found:
            return str(ipaddress.IPv6Address(int(found[scope], 16))) + suffix
    raise ValueError(f"the network interface {interface!r} of GLOO_SOCKET_IFNAME has no address")
