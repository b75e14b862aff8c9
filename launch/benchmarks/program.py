"""Runs the benchmarks and redraws the tables and figures of what is in docs/data/bench/.

    python launch/bench.py                              # everything: about 40 minutes on two cores
    python launch/bench.py --part kernels --part links  # some parts, and the drawing
    python launch/bench.py --quick                      # a few steps of each kind, into runs/quick: ten minutes
    python launch/bench.py --missing                    # after an interruption: what this commit has no figures of
    python launch/bench.py --draw                       # no measuring: draw what is there
    python launch/bench.py --part exchange --model vgg16 --rates 1gbit   # one part with flags of its own, not drawn
    python launch/bench.py --part exchange --device cuda         # on GPUs, as all parts but links and growth can be
    python launch/bench.py --part exchange --help       # its flags

A part that fails is named at the end and does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks import exchange, growth, kernels, layouts, links, memory, report, time_to_accuracy, training
from benchmarks.results import FOLDER, commit, load
from common.docs import DOCS
from common.errors import RunError
from common.values import Parser
from lab.hosts import come_down_on_signals

QUICK_DIR = Path("runs/quick")
_WHERE = ("--output-dir", "--data-dir")
_MANY = ("--rates", "1gbit", "--methods", "none,fp16,1bit,4bit,8bit", "--seconds", "30", "--model", "resnet18")


@dataclass(frozen=True)
class Part:
    """A benchmark with some of its flags, the files in docs/data/bench/ that the pages are drawn from, and flags for
    ``--quick``, if it takes part in that.

    ``benchmark`` has ``add_arguments(parser)`` and ``run(args)``; ``args.command`` is how a reader would type it.
    """

    benchmark: ModuleType
    flags: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()


_SHARDED = (
    "--models",
    "transformer-short",
    "--workers",
    "4",
    "--workers-per-host",
    "2",
    "--rates",
    "100mbit,1gbit,none,shm",
)
_FEW = ("--methods", "alone,none,fp16,0.25bit,1bit,4bit,powersgd1", "--rounds", "8")

PARTS = {
    "kernels": Part(kernels, files=(kernels.FILE,), quick=("--values", str(2**22), "--rounds", "3")),
    "exchange": Part(
        exchange,
        files=("exchange-resnet50-2.json",),
        quick=("--rates", "100mbit,1gbit,shm", "--seconds", "20", *_FEW),
    ),
    "bytes4": Part(exchange, ("--workers", "4", *_MANY), ("exchange-resnet18-4.json",)),
    "bytes8": Part(exchange, ("--workers", "8", *_MANY), ("exchange-resnet18-8.json",)),
    "hosts": Part(
        layouts,
        files=("exchange-resnet50-2x2.json", "exchange-resnet50-2x4.json"),
        quick=("--model", "resnet18", "--layouts", "2x2", "--rates", "1gbit", "--seconds", "20"),
    ),
    "training": Part(
        training,
        files=tuple(f"training-{model}-2.json" for model in ("resnet20", "resnet18", "mlp", "transformer")),
        quick=("--models", "resnet20,mlp", "--rates", "100mbit", "--seconds", "20", *_FEW),
    ),
    "sharded": Part(
        training,
        (*_SHARDED, "--methods", "shards-alone,hsdp,hsdp-bf16,4bit-fsdp,0.25bit-fsdp", "--seconds", "120"),
        ("training-transformer-short-2x2.json",),
        ("--rates", "100mbit,shm", "--seconds", "20", "--rounds", "8"),
    ),
    "accuracy": Part(
        time_to_accuracy,
        files=("accuracy-resnet20.json",),
        quick=("--model", "resnet8", "--epochs", "2", "--limit-train", "3000", "--lr", "0.05", "--tolerance", "5"),
    ),
    "memory": Part(
        memory,
        files=(memory.file_name(),),
        quick=("--values", str(2**24), "--layouts", "2", "--methods", "none,4bit"),
    ),
    "links": Part(links),
    "growth": Part(growth, files=(growth.FILE,)),  # the last: it reads what others have measured
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
    """Whether it has files, and all of them are there and of this commit."""
    return bool(part.files) and all(commits(load(FOLDER / name)) == {commit()} for name in part.files)


def parse_part(name: str, flags: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the flags of one part; a bad one ends with status 2 after one line."""
    part = PARTS[name]
    prog, raw = f"bench.py --part {name}", argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=part.benchmark.__doc__, formatter_class=raw, allow_abbrev=False)
    part.benchmark.add_arguments(parser)
    args = parser.parse_args([*part.flags, *flags])
    args.command = " ".join(["python launch/bench.py --part", name, *_what(flags)])
    return args


def _what(flags: Sequence[str]) -> Iterator[str]:
    """Flags without those that say where files lie, which is a machine's own."""
    left = iter(flags)
    for flag in left:
        if flag in _WHERE:
            next(left)
        elif not flag.startswith(tuple(f"{name}=" for name in _WHERE)):
            yield flag


def run(name: str, args: argparse.Namespace) -> bool:
    """Run a part; whether it succeeded."""
    print(f"bench.py: {args.command}", flush=True)
    try:
        PARTS[name].benchmark.run(args)
    except (RunError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"bench.py: error: {name}: {error}", file=sys.stderr)
        return False
    return True


def parse(argv: list[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """Parse a command line; a bad one ends with status 2 after one line. Returns the flags of a single part as well."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="bench.py", description=__doc__, formatter_class=raw, allow_abbrev=False, add_help=False)
    add = parser.add_argument
    add("-h", "--help", action="store_true", help="show this, or what --part PART can be told")
    add("--part", action="append", choices=PARTS, metavar="PART", help=f"of {', '.join(PARTS)}; may be repeated")
    add("--quick", action="store_true", help=f"a few steps of most parts, into {QUICK_DIR}; nothing is drawn")
    add("--missing", action="store_true", help="leave out parts whose files are there and of this commit")
    add("--draw", action="store_true", help="measure nothing")
    args, flags = parser.parse_known_args(argv)
    single = len(args.part or ()) == 1
    if args.help and not single:
        parser.print_help()
        raise SystemExit(0)
    if args.quick and (flags or args.missing or args.draw):
        parser.error("--quick goes with --part only")
    if flags and (not single or args.missing or args.draw):
        parser.error(f"unrecognized arguments: {' '.join(flags)} (a single --part has flags of its own)")
    return args, [*flags, "--help"] if args.help else flags


def main(argv: list[str] | None = None) -> None:
    args, flags = parse(argv)
    wanted = [name for name, part in PARTS.items() if (part.quick if args.quick else part.files)]
    names = [] if args.draw else args.part or wanted
    quick = ("--output-dir", str(QUICK_DIR))
    chosen = {name: parse_part(name, (*PARTS[name].quick, *quick) if args.quick else flags) for name in names}
    come_down_on_signals()
    failed = []
    for name, flags_of_part in chosen.items():
        if args.missing and measured(PARTS[name]):
            print(f"bench.py: {name} is measured already", flush=True)
        elif not run(name, flags_of_part):
            failed.append(name)
    if not flags and not args.quick:
        try:
            report.draw(DOCS)
        except (RunError, OSError) as error:
            print(f"bench.py: error: {error}", file=sys.stderr)
            failed.append("the drawing")
    if failed:
        print(f"bench.py: error: failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(2)
