"""Trains what the declared study lacks, and writes its tables and figures: docs/study.md and docs/study/.

One process plays all workers of a task. Which runs make up which table stands in launch/studies/declared.py; each run
is a line of screen.jsonl, and what is there is not trained again.

The paper's scenarios on real ranks: --paper. Single experiments with simulated workers: --simulate NAME. Both have
flags of their own (--help).
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Iterable
from pathlib import Path

from common.errors import RunError
from common.files import replace_text
from common.values import Parser, count
from screening import results
from screening.program import fill
from studies import declared, matrix, pareto, tuned_plot, tuned_tables
from studies.parts import Largest, Part, Runs, Tuned

RESULTS, DETAILS = "screen.jsonl", "screen.md"
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
    add("--output-dir", type=Path, metavar="DIR", help=f"of {RESULTS}, {DETAILS} and figures (default docs/study)")
    add("--pages", type=Path, nargs="*", metavar="FILE", help="with tables to fill (default the study's two)")
    args = parser.parse_args(argv)
    if args.output_dir is None:
        args.output_dir = QUICK_DIR if args.quick else Path("docs/study")
    if args.pages is None:
        args.pages = [] if args.quick else [Path("docs/study.md"), Path("docs/tables/study.md")]
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
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not args.tables_only:
        for part in chosen:
            train(part, path, args.data_dir, jobs=args.jobs)
    runs = results.read(path)
    there = [runs[key] for key in declared.keys(parts) if key in runs]
    if not there:
        raise RunError(f"no run in {path}")
    written = tables(parts, runs)
    for page in args.pages:
        replace_text(page, matrix.filled(page.read_text(encoding="utf-8"), written))
    replace_text(args.output_dir / DETAILS, details(there))
    main_part = next(part for part in parts if isinstance(part, Part) and part.name == "main")
    pareto.write(args.output_dir, main_part, runs)
    panels = [part for part in parts if isinstance(part, Tuned) and part not in declared.AGAIN]
    tuned_plot.write(args.output_dir, panels, runs)
    if args.quick:
        print(written["main"])
    print(f"wrote {', '.join(map(str, [*args.pages, args.output_dir / DETAILS]))} and the figures", flush=True)


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


def details(runs: list[dict]) -> str:
    """A page with all that is known of each task and contender."""
    return (
        "# All runs of the study\n\nWritten by `make study`; [study.md](../study.md) says what the columns are.\n\n"
        f"{results.table(runs)}\n"
    )


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
        names = "; ".join(f"{contender} ({', '.join(seeds)})" for contender, seeds in lacking.items())
        lines.append(f"{task}: {number} runs, {took}{': ' if names else ''}{names}")
    return "\n".join(lines)
