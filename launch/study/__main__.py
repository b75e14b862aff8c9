"""Trains what the declared study lacks, and writes its tables and figures into docs/.

    python launch/study                # hours of it
    python launch/study --quick        # two small tasks, one seed: five minutes
    python launch/study paper          # the paper's scenarios on real ranks
    python launch/study paper --help   # its flags

One process plays all workers of a task, but for the paper's. Which runs make up which table stands in
launch/study/declared.py; each run is a line of screen.jsonl, and what is there is not trained again.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # whose folders know each other by name

from common.docs import DATA, DOCS, FIGURES, TABLES
from common.errors import RunError
from common.files import replace_text
from common.markdown import filled
from common.values import Parser, count
from study import compared, declared, error_feedback, figures, paper, paper_table, record
from study.fill import fill
from study.methods import shown
from study.parts import Largest, Part, Runs, Tuned

RESULTS = Path(DATA, "study", "screen.jsonl")
PAGE = "study.md"
QUICK_DIR = Path("runs/quick")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line."""
    look: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="study", description=__doc__, **look)
    parser.set_defaults(run=run)
    names = [part.name for part in declared.PARTS]
    add = parser.add_argument
    add("--quick", action="store_true", help=f"two small tasks, one seed: five minutes; all into {QUICK_DIR}")
    add("--parts", nargs="+", choices=names, metavar="NAME", help=f"train only for some of: {'; '.join(names)}")
    add("--tables-only", action="store_true", help="train nothing; show the runs that are there")
    add("--missing", action="store_true", help="train and write nothing; say which runs are not there yet")
    jobs = os.cpu_count() or 1
    add("--jobs", type=count, default=jobs, metavar="N", help="processes at a time (default: one a core)")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets lie (default data)")
    add("--output-dir", type=Path, metavar="DIR", help=f"of {RESULTS}, tables and figures (default {DOCS})")
    paper.add_arguments(parser.add_subparsers(metavar="paper").add_parser("paper", description=paper.__doc__, **look))
    args = parser.parse_args(argv)
    if args.run is not run and argv[0].startswith("-"):
        parser.error(f"{argv[0]}: flags of paper come after that word")
    args.command = " ".join(["python launch/study", *argv])
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    try:
        args.run(args)
    except (RunError, OSError, subprocess.TimeoutExpired) as error:
        print(f"study: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run(args: argparse.Namespace) -> None:
    """The declared study.

    Raises:
        RunError: a data set is not there, or the results are not ours.
        OSError: a page or a result cannot be read or written.
    """
    output = args.output_dir or (QUICK_DIR if args.quick else DOCS)
    parts = declared.QUICK if args.quick else declared.PARTS
    path, drawn = output / RESULTS, output / FIGURES
    chosen = [part for part in parts if args.parts is None or part.name in args.parts]
    if args.missing:
        print(missing(chosen, record.read(path)))
        return
    for folder in (path.parent, *(() if args.quick else (drawn, output / TABLES))):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.tables_only:
        for part in chosen:
            train(part, path, args.data_dir, jobs=args.jobs)
    runs = record.read(path)
    if not any(key in runs for key in declared.keys(parts)):
        raise RunError(f"no run in {path}")
    written = compared.tables(parts, runs)
    if args.quick:
        print("\n".join(written.values()))
    else:
        write_pages(output, written)
        figures.as_people_train(drawn, declared.DRAWN, declared.RECIPE_ELSEWHERE, runs)
        figures.at_best_rates(drawn, declared.DRAWN_AT_BEST_RATES, runs)
        error_feedback.draw(drawn)
    print(f"wrote what is in {output}", flush=True)


def write_pages(docs: Path, tables: Mapping[str, str]) -> None:
    """The tables between the marks of the pages that are there, and the paper's page, if that has been run."""
    for page in (docs / PAGE, docs / TABLES / PAGE):
        if page.exists():
            replace_text(page, filled(page.read_text(encoding="utf-8"), tables, "make study"))
    paper_table.redraw(docs)


def train(part: Part | Tuned | Largest, path: Path, data_dir: Path, *, jobs: int) -> None:
    """All runs of a part that are missing. What is wanted may follow from those that have just been made."""
    runs = record.read(path)
    while lacking := [key for key in part.wanted(runs) if key not in runs]:
        fill(lacking, path, data_dir, jobs=jobs)
        runs = record.read(path)


def missing(parts: Iterable[Part | Tuned | Largest], runs: Runs) -> str:
    """Which runs are not there, task by task, and what the task's other runs took."""
    wanted = list(dict.fromkeys(key for part in parts for key in part.wanted(runs)))
    lines = []
    for task in dict.fromkeys(task for task, *_ in wanted):
        seconds = [run["seconds"] for (other, *_), run in runs.items() if other == task]
        took = f"{statistics.median(seconds):.0f} s each" if seconds else "never timed"
        lacking: dict[str, list[str]] = {}
        for other, method, seed in wanted:
            if other == task and (other, method, seed) not in runs:
                lacking.setdefault(method, []).append(str(seed))
        number = sum(map(len, lacking.values()))
        names = "; ".join(f"{shown(method)} ({', '.join(seeds)})" for method, seeds in lacking.items())
        lines.append(f"{task}: {number} runs, {took}{': ' if names else ''}{names}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
