"""The commands `info`, `probe`, `run` and `report`; see --help."""

from __future__ import annotations

import argparse
import sys

from hvd_dyncomp.commands import info
from hvd_dyncomp.commands.probe import command as probe
from hvd_dyncomp.commands.report import command as report
from hvd_dyncomp.commands.run import command as run


def commands() -> argparse.ArgumentParser:
    """The parser of all commands; what it has parsed has the chosen one as `main`."""
    parser = argparse.ArgumentParser(prog="python -m hvd_dyncomp", allow_abbrev=False)
    each = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, about in (
        ("info", info, "print versions, kernels and what connects ranks here, for reports of faults"),
        ("probe", probe, "time exchanges of gradients on this job's ranks and network, and say whether to compress"),
        ("run", run, "run a training program as it is, with its models compressed"),
        ("report", report, "write a page, one file of HTML, about runs of launch/train_resnet.py"),
    ):
        added = each.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.", allow_abbrev=False)
        added.set_defaults(main=command.main)
        command.add_arguments(added)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run a command; return the status to exit with."""
    args = commands().parse_args(argv)
    return args.main(args)


if __name__ == "__main__":
    sys.exit(main())
