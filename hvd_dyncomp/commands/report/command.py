"""The command: its arguments, and the page that it writes."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_dyncomp.commands.report.runs import METRICS, UnreadableRun, read_runs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments.

    Args:
        parser: of the command.
    """
    parser.set_defaults(parser=parser)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help=f"a run's --output-dir, with {METRICS}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first RUN_DIR")


def main(args: argparse.Namespace) -> int:
    """Write the page and print its path.

    Returns:
        0, or 2 after one line on stderr if matplotlib is missing, a run is unreadable or the page cannot be written.
    """
    parser, output = args.parser, args.output or args.runs[0] / "report.html"
    try:
        from hvd_dyncomp.commands.report.page import page  # needs matplotlib, which --help does not

        text = page(read_runs(args.runs))
        output.write_text(text, encoding="utf-8")
    except (UnreadableRun, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {output} cannot be written: {error.strerror}\n")
    sys.stdout.write(f"{output}\n")
    return 0
