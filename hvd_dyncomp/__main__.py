"""The commands; see --help."""

from __future__ import annotations

import argparse
import sys

from hvd_dyncomp.run import command


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Returns:
        The command's exit status.
    """
    parser = argparse.ArgumentParser(prog="python -m hvd_dyncomp")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    text = "Run a program as it is, with its models compressed; start it by torchrun, horovodrun, mpirun or srun."
    run = commands.add_parser(
        "run", allow_abbrev=False, help="run a program with its models compressed", description=text
    )
    run.set_defaults(main=command.main)
    command.add_arguments(run)
    args = parser.parse_args(argv)
    return args.main(args)


if __name__ == "__main__":
    sys.exit(main())
