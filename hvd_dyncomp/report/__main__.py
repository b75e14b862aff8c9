"""Write a page about training runs; see --help."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hvd_dyncomp.report.runs import METRICS, UnreadableRun, read_runs


def main(argv: list[str] | None = None) -> int:
    """Write the page and print its path.

    Returns:
        0, or 2 after one line on stderr if matplotlib is missing, a run is unreadable or the page cannot be written.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hvd_dyncomp.report",
        description="Write a page, one file of HTML, about runs of launch/train_resnet.py, finished or under way.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help=f"a run's --output-dir, with {METRICS}")
    parser.add_argument("--output", type=Path, metavar="FILE", help="default: report.html in the first RUN_DIR")
    args = parser.parse_args(argv)
    output = args.output or args.runs[0] / "report.html"
    try:
        from hvd_dyncomp.report.page import page  # needs matplotlib, which --help does not

        text = page(read_runs(args.runs))
        output.write_text(text, encoding="utf-8")
    except (UnreadableRun, ImportError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    except OSError as error:
        parser.exit(2, f"{parser.prog}: error: {output} cannot be written: {error.strerror}\n")
    sys.stdout.write(f"{output}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
