"""Trains what the declared study lacks, and writes its tables and figures into docs/.

One process plays all workers of a task. Which runs make up which table stands in launch/studies/declared.py; each run
is a line of screen.jsonl, and what is there is not trained again.

The paper's scenarios on real ranks: --paper. Trainings of one's own choice: --simulate screen. Both have flags of their
own (--help).
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path

from common.docs import DATA, DOCS, FIGURES, TABLES
from common.errors import RunError
from common.files import replace_text
from common.values import Parser, count
from screening import results
from screening.contenders import shown
from screening.program import fill
from studies import declared, figures, matrix, paper_table, tuned_tables
from studies.page import page
from studies.parts import Largest, Part, Runs, Tuned

RESULTS = Path(DATA, "study", "screen.jsonl")
PAGE = "study.md"
QUICK_DIR = Path("runs/quick")


def parse(argv: list[str]) -> argparse.Namespace:
    """Parse a command line. A bad one ends with status 2 after one line."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="study.py", description=__doc__, formatter_class=raw, allow_abbrev=False)
    names = [part.name for part in declared.PARTS]
    add = parser.add_argument
    add("--quick", action="store_true", help=f"two small tasks, one seed: five minutes; all into {QUICK_DIR}")
    add("--parts", nargs="+", choices=names, metavar="NAME", help=f"train only for some of: {'; '.join(names)}")
    add("--tables-only", action="store_true", help="train nothing; show the runs that are there")
    add("--missing", action="store_true", help="train and write nothing; say which runs are not there yet")
    add(
        "--jobs", type=count, default=os.cpu_count() or 1, metavar="N", help="processes at a time (default: one a core)"
    )
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets lie (default data)")
    add("--output-dir", type=Path, metavar="DIR", help=f"of {RESULTS}, tables and figures (default {DOCS})")
    args = parser.parse_args(argv)
    if args.output_dir is None:
        args.output_dir = QUICK_DIR if args.quick else DOCS
    return args


def main(argv: list[str]) -> None:
    """Do what a command line says.

    Raises:
        RunError: a data set is not there, or the results are not ours.
        OSError: a page or a result cannot be read or written.
    """
    args = parse(argv)
    parts = declared.QUICK if args.quick else declared.PARTS
    path = args.output_dir / RESULTS
    chosen = [part for part in parts if args.parts is None or part.name in args.parts]
    if args.missing:
        print(missing(chosen, results.read(path)))
        return
    drawn = args.output_dir / FIGURES
    for folder in (path.parent, drawn, args.output_dir / TABLES):
        folder.mkdir(parents=True, exist_ok=True)
    if not args.tables_only:
        for part in chosen:
            train(part, path, args.data_dir, jobs=args.jobs)
    runs = results.read(path)
    there = [runs[key] for key in declared.keys(parts) if key in runs]
    if not there:
        raise RunError(f"no run in {path}")
    written = tables(parts, runs)
    if not args.quick:
        write_pages(args.output_dir, written)
    main_part = next(part for part in parts if isinstance(part, Part) and part.name == "main")
    figures.at_one_rate(drawn, main_part, runs)
    tuned = [part for part in parts if isinstance(part, Tuned) and part not in declared.AGAIN]
    figures.at_best_rates(drawn, tuned, runs)
    if args.quick:
        print(written["main"])
    print(f"wrote what is in {args.output_dir}", flush=True)


def write_pages(docs: Path, tables: Mapping[str, str]) -> None:
    """The page of all tables; the paper's, if that has been run; and the study's own, between its marks."""
    replace_text(docs / TABLES / PAGE, page(tables))
    paper_table.redraw(docs)
    if (docs / PAGE).exists():
        replace_text(docs / PAGE, matrix.filled((docs / PAGE).read_text(encoding="utf-8"), tables))


def train(part: Part | Tuned | Largest, path: Path, data_dir: Path, *, jobs: int) -> None:
    """All runs of a part that are missing. What is wanted may follow from those that have just been made."""
    runs = results.read(path)
    while lacking := [key for key in part.wanted(runs) if key not in runs]:
        fill(lacking, path, data_dir, jobs=jobs, curves=False)
        runs = results.read(path)


def tables(parts: Iterable[Part | Tuned | Largest], runs: Runs) -> dict[str, str]:
    """Markdown, by name."""
    found = {}
    for part in parts:
        if isinstance(part, Tuned):
            found[part.name] = tuned_tables.tuned(part, runs)
        elif isinstance(part, Largest):
            found[part.name] = tuned_tables.largest(part, runs)
        else:
            found[part.name] = matrix.table(part, runs)
    return found


def missing(parts: Iterable[Part | Tuned | Largest], runs: Runs) -> str:
    """Which runs are not there, task by task, and what the task's other runs took."""
    wanted = list(dict.fromkeys(key for part in parts for key in part.wanted(runs)))
    lines = []
    for task in dict.fromkeys(task for task, *_ in wanted):
        seconds = [run["seconds"] for (other, *_), run in runs.items() if other == task]
        took = f"{statistics.median(seconds):.0f} s each" if seconds else "never timed"
        lacking: dict[str, list[str]] = {}
        for other, contender, seed in wanted:
            if other == task and (other, contender, seed) not in runs:
                lacking.setdefault(contender, []).append(str(seed))
        number = sum(map(len, lacking.values()))
        names = "; ".join(f"{shown(contender)} ({', '.join(seeds)})" for contender, seeds in lacking.items())
        lines.append(f"{task}: {number} runs, {took}{': ' if names else ''}{names}")
    return "\n".join(lines)
