"""train_resnet.py on one machine that passes for several hosts.

    horovodrun -np 4 python tests/launch/placed.py aabb -- FLAGS...

The letters are the hosts of the ranks, one for each.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch"))

import horovod.torch as hvd

import train_resnet
from hvd_dyncomp.transport.horovod import HorovodTransport


def place(hosts: str) -> None:
    HorovodTransport.host = property(lambda self: hosts[hvd.rank()])  # type: ignore[assignment]
    HorovodTransport.local_size = property(lambda self: hosts.count(hosts[hvd.rank()]))  # type: ignore[assignment]


def main() -> None:
    hosts, separator, *flags = sys.argv[1:]
    assert separator == "--"
    place(hosts)
    sys.argv[1:] = flags
    train_resnet.main()


if __name__ == "__main__":
    main()
