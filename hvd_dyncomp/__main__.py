"""python -m hvd_dyncomp probe: would it pay on my machines?"""

from __future__ import annotations

import argparse
import sys

from hvd_dyncomp.probe import command as probe


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand; return the status to exit with."""
    parser = argparse.ArgumentParser(prog="hvd_dyncomp", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    about = "time exchanges of gradients on this job's ranks, devices and network, and say whether to compress"
    probe.add_arguments(commands.add_parser("probe", help=about, description=about, allow_abbrev=False))
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
