"""The address that a rank announces, by the interface that GLOO_SOCKET_IFNAME names."""

import subprocess
import sys

import pytest

from lab.hosts import why_not

PROGRAM = """
import os, socket, sys
from hvd_dyncomp.transport.address import announced, listening

def said(interface):
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        address = announced()
    except ValueError as error:
        return str(error)
    with listening(address, 1) as listener, socket.create_connection((address, listener.getsockname()[1])):
        assert int.from_bytes(socket.inet_pton(listener.family, listener.getsockname()[0].partition("%")[0]))
    return address

for interface in sys.argv[1:]:
    print(said(interface))
"""
NETWORK = """set -e
ip link add both type veth peer name six
ip link add near type veth peer name none
for each in both six near none; do sysctl -qw net.ipv6.conf.$each.accept_dad=0; done
sysctl -qw net.ipv6.conf.none.disable_ipv6=1
for each in lo both six near none; do ip link set $each up; done
ip address add 10.9.8.7/24 dev both
ip address add fd00::1/64 dev both nodad
ip address add fd00::2/64 dev six nodad
exec "$@"
"""


@pytest.mark.skipif(bool(why_not()), reason=why_not() or "namespaces can be made")
def test_an_interface_has_ipv4_or_ipv6_or_an_error_that_names_it():
    names = ["both", "six", "near", "none", "other", "six,both"]
    inside = ["sh", "-c", NETWORK, "sh", sys.executable, "-P", "-c", PROGRAM, *names]
    done = subprocess.run(
        ["unshare", "--net", *inside], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60
    )
    lines = done.stdout.splitlines()
    assert len(lines) == len(names), done.stdout
    both, six, near, none, other, first = lines
    assert (both, six, first) == ("10.9.8.7", "fd00::2", "fd00::2")
    assert near.startswith("fe80::") and near.endswith("%near")
    assert none == "the network interface 'none' of GLOO_SOCKET_IFNAME has no address"
    assert other == "GLOO_SOCKET_IFNAME must begin with a network interface of this host, got 'other'"
