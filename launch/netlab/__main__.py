"""Runs a program on several hosts that are network namespaces of this machine, over links of a given rate.

    python launch/netlab --hosts 2 --rate 100mbit -- python launch/train_resnet.py --epochs 1
    python launch/netlab --hosts 2 --workers-per-host 4 --rate 1gbit -- python launch/train_resnet.py --epochs 1
    python launch/netlab --launcher torchrun --rate 1gbit -- python launch/train_resnet.py --epochs 1   # no Horovod

Every host has one interface, called eth0, which serves all its workers. What leaves a host is held to --rate (tc's
token bucket); workers of one host talk over shared memory (Open MPI) or loopback (Gloo). Two hosts are joined by a veth
pair, more by a bridge. After the run the bytes that each interface sent are printed, and everything is taken down
again. Needs root and iproute2. No ssh server is needed: where a launcher would call ssh, it finds a script that enters
the other host's namespace. torchrun calls none: every host has one, and when one fails, all are ended.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NoReturn

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # whose folders know each other by name

from common import launcher
from common.errors import RunError
from common.values import Parser, count
from netlab.hosts import LAUNCHERS, come_down_on_signals, hosts


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line."""
    parser = Parser(prog="netlab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--hosts", type=count, default=2, metavar="N", help="network namespaces (default 2)")
    add("--workers-per-host", type=count, default=1, metavar="L", help="ranks on each host (default 1)")
    add("--rate", default="none", metavar="RATE", help="what may leave a host: 100mbit, 2.5gbit, none (default none)")
    add("--launcher", choices=LAUNCHERS, default="mpirun", help="gloo: horovodrun without MPI (default mpirun)")
    add("program", nargs="+", metavar="-- program", help="and its arguments")
    return parser.parse_args(argv)


def _fail(text: str) -> NoReturn:
    print(f"netlab: error: {text}", file=sys.stderr)
    raise SystemExit(2)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    come_down_on_signals()
    try:
        with hosts(args.hosts, args.rate, args.workers_per_host) as lab:
            before = lab.counters()
            command = lab.command(args.program, launcher=args.launcher)
            ended = launcher.run(command, timeout=1e6, output=sys.stdout)
            sent = [now - then for now, then in zip(lab.counters(), before, strict=True)]
    except (RunError, ValueError, OSError) as error:
        _fail(str(error))
    for address, nbytes in zip(lab.addresses, sent, strict=True):
        print(f"{address} sent {nbytes / 1e6:.3f} MB", file=sys.stderr)
    raise SystemExit(ended.returncode)


if __name__ == "__main__":
    main()
