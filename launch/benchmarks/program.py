"""Runs all benchmarks and redraws docs/benchmarks.md.

    python launch/bench.py                       # everything: about 40 minutes on two cores
    python launch/bench.py --parts exchange      # one part, and the drawing
    python launch/bench.py --missing             # after an interruption: what this commit has no figures of
    python launch/bench.py --parts               # no measuring: draw what is there

A part that fails is named at the end and does not stop the others.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import FOLDER, commit, load
from common.values import Parser

_LAUNCH = Path(__file__).parents[1]
_MANY = ("--rates", "1gbit", "--contenders", "none,fp16,1bit,4bit,8bit", "--seconds", "30", "--model", "resnet18")


@dataclass(frozen=True)
class Part:
    """A program of this folder, its arguments, and the files it writes into docs/bench/."""

    program: str
    arguments: tuple[str, ...]
    files: tuple[str, ...]


PARTS = {
    "kernels": Part("benchmarks.kernels", ("--json", str(FOLDER / "kernels.json")), ("kernels.json",)),
    "exchange": Part("benchmarks.exchange", (), ("exchange-resnet50-2.json",)),
    "bytes4": Part("benchmarks.exchange", ("--workers", "4", *_MANY), ("exchange-resnet18-4.json",)),
    "bytes8": Part("benchmarks.exchange", ("--workers", "8", *_MANY), ("exchange-resnet18-8.json",)),
    "training": Part(
        "benchmarks.training",
        (),
        tuple(f"training-{model}-2.json" for model in ("resnet20", "resnet18", "mlp", "transformer")),
    ),
    "accuracy": Part("benchmarks.training", ("--time-to-accuracy",), ("accuracy-resnet20.json",)),
}


def commits(results: Any) -> set[str]:
    """Every "commit" that a file's contents mention."""
    if isinstance(results, list):
        return set().union(*map(commits, results))
    if not isinstance(results, dict):
        return set()
    own = {results["commit"]} if isinstance(results.get("commit"), str) else set()
    return own.union(*map(commits, results.values()))


def measured(part: Part) -> bool:
    """Whether all its files are there and of this commit."""
    return all(commits(load(FOLDER / name)) == {commit()} for name in part.files)


def run(part: Part) -> bool:
    """Run a part's program; whether it succeeded."""
    command = [sys.executable, "-P", "-m", part.program, *part.arguments]
    print(f"bench.py: {' '.join(['python', *command[1:]])}", flush=True)
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(_LAUNCH)}).returncode == 0


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line."""
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--parts", nargs="*", choices=PARTS, default=list(PARTS), metavar="PART", help=f"of {', '.join(PARTS)}")
    add("--missing", action="store_true", help="leave out parts whose files are there and of this commit")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    FOLDER.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in args.parts:
        if args.missing and measured(PARTS[name]):
            print(f"bench.py: {name} is measured already", flush=True)
        elif not run(PARTS[name]):
            failed.append(name)
    if not run(Part("benchmarks.report", (), ())):
        failed.append("report")
    if failed:
        print(f"bench.py: error: failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(1)
