"""Runs the benchmarks and redraws the tables and figures of what is in docs/data/bench/.

    python launch/bench                              # what the pages lack, or have of another wire version
    python launch/bench --all                        # everything: an hour and a half on two cores
    python launch/bench --quick                      # a few steps of each kind, into runs/quick: ten minutes
    python launch/bench missing                      # no measuring: say what is to be measured, and how long it takes
    python launch/bench draw                         # no measuring: draw what is there
    python launch/bench exchange --model vgg16 --rates 1gbit   # one part, not drawn; add --help for its flags
    python launch/bench exchange --device cuda       # on GPUs, as all parts can be
    python launch/bench exchange --launcher torchrun # without Horovod and MPI: methods of DDP and FSDP2

A part that fails is named at the end and does not stop the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # whose folders know each other by name

from bench import changing, curves, growth, kernels, memory, said, steps
from bench.results import FOLDER, is_current, load
from bench.steppers import WITHOUT_HOROVOD, without_horovod
from common.docs import DOCS
from common.errors import RunError
from common.launcher import TORCHRUN
from common.values import Parser
from netlab.hosts import come_down_on_signals

QUICK_DIR = Path("runs/quick")
_WHERE = ("--output-dir", "--data-dir")


@dataclass(frozen=True)
class Part:
    """A benchmark.

    Attributes:
        add_arguments: adds its flags, and says by its docstring what it is.
        defaults: other ones of these flags.
        quick: those for ``--quick``, if it takes part in that.
        writes: files that the pages are made of.
        minutes: that it takes on two cores.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    defaults: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()
    minutes: int = 0


_MANY = {"rates": "1gbit,10gbit", "methods": "none,fp16,0.25bit,1bit,4bit", "seconds": "40", "model": "resnet18"}
_DDP = {
    **{"launcher": TORCHRUN, "models": "resnet18,transformer,resnet20", "rates": "100mbit,1gbit,10gbit,none,shm"},
    "methods": "alone,ddp,ddp-fp16,powersgd1,powersgd4,4bit-ddp,1bit-ddp,0.25bit-ddp,ddp-fp16-x4,4bit-ddp-x4,"
    "ddp-defaults,4bit-ddp-defaults",
    "seconds": "40",
}
_ADAMW = {
    **{"launcher": TORCHRUN, "models": "transformer-adamw", "rates": "1gbit,10gbit", "seconds": "35"},
    "methods": "alone,ddp,ddp-fp16,powersgd1,4bit-ddp,0.25bit-ddp",
}
_SMALL = {
    **{"model": "small-tensors", "rates": "1gbit,shm", "seconds": "40"},
    "methods": "none,fp16,4bit,ddp,4bit-ddp",
}
_FEW = {"methods": "alone,none,fp16,0.25bit,1bit,4bit,powersgd1", "rounds": "8", "seconds": "20"}
_SHARDED = {
    **{"models": "transformer-short", "workers": "4", "workers_per_host": "2", "rates": "100mbit,1gbit,none,shm"},
    **{"methods": "shards-alone,hsdp,hsdp-bf16,4bit-fsdp,0.25bit-fsdp", "seconds": "120"},
}
PARTS = {
    "kernels": Part(
        kernels.add_arguments, quick={"values": str(2**22), "rounds": "3"}, writes=("kernels.json",), minutes=1
    ),
    "exchange": Part(
        steps.exchange,
        quick={"rates": "100mbit,1gbit,shm", **_FEW},
        writes=("exchange-resnet50-2.json",),
        minutes=8,
    ),
    "small": Part(steps.exchange, _SMALL, writes=("exchange-small-tensors-2.json",), minutes=3),
    "workers4": Part(steps.exchange, {"workers": "4", **_MANY}, writes=("exchange-resnet18-4.json",), minutes=2),
    "workers8": Part(steps.exchange, {"workers": "8", **_MANY}, writes=("exchange-resnet18-8.json",), minutes=3),
    "hosts": Part(
        steps.on_hosts,
        quick={"model": "resnet18", "layouts": "2x2", "rates": "1gbit", "seconds": "20"},
        writes=("exchange-resnet50-2x2.json", "exchange-resnet50-2x4.json", "exchange-resnet50-4x2.json"),
        minutes=15,
    ),
    "ddp": Part(
        steps.training,
        _DDP,
        writes=tuple(f"training-{model}-2-torchrun.json" for model in ("resnet18", "transformer", "resnet20")),
        minutes=20,
    ),
    "ddp-adamw": Part(steps.training, _ADAMW, writes=("training-transformer-adamw-2-torchrun.json",), minutes=2),
    "training": Part(
        steps.training,
        quick={"models": "resnet20,mlp", "rates": "100mbit", **_FEW},
        writes=tuple(f"training-{model}-2.json" for model in ("resnet18", "transformer", "resnet20", "mlp")),
        minutes=10,
    ),
    "sharded": Part(
        steps.training,
        _SHARDED,
        {"rates": "100mbit,shm", "seconds": "20", "rounds": "8"},
        writes=("training-transformer-short-2x2.json",),
        minutes=10,
    ),
    "changing": Part(
        changing.add_arguments,
        quick={"phases": "none:4,100mbit:4", "steps": "5"},
        writes=("changing-pauses.json",),
        minutes=6,
    ),
    "curves": Part(
        curves.add_arguments,
        {"launcher": TORCHRUN},
        {"models": "resnet8,tiny", "steps": "40"},
    ),
    "memory": Part(
        memory.add_arguments,
        quick={"values": str(2**24), "layouts": "2", "methods": "none,4bit"},
        writes=("memory.json",),
        minutes=5,
    ),
    "growth": Part(
        growth.add_arguments,
        quick={"layouts": "2x1,8x1,2x8", "values": str(2**20)},
        writes=(growth.FILE,),
        minutes=2,
    ),
    "probe": Part(said.add_arguments, writes=(said.FILE,), minutes=2),
}


def parse(argv: Sequence[str], *, quick: bool = False) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line.

    Args:
        argv: as in argparse.
        quick: parts do as little as with ``--quick``.
    """
    look: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="bench", description=__doc__, **look)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help=f"a few steps of most parts, into {QUICK_DIR}; not drawn")
    how.add_argument("--all", action="store_true", help="what is there of this wire version, too")
    parts = parser.add_subparsers(dest="part", metavar="PART")
    for name, part in PARTS.items():
        about = described(part.add_arguments)
        own = parts.add_parser(name, description=about, help=about.partition(".\n")[0], **look)
        part.add_arguments(own)
        own.set_defaults(**{**part.defaults, **({**part.quick, "output_dir": str(QUICK_DIR)} if quick else {})})
    parts.add_parser("missing", help="measure nothing, and say what is to be measured").set_defaults(run=_say_missing)
    parts.add_parser("draw", help="measure nothing").set_defaults(run=_draw)
    args = parser.parse_args(argv)
    if args.part and (args.quick or args.all):
        parser.error(f"--{'quick' if args.quick else 'all'} is for all parts, not for {args.part}")
    if getattr(args, "launcher", "") == TORCHRUN:
        if not any(flag.partition("=")[0] == "--methods" for flag in argv):
            args.methods = without_horovod(args.methods)
        elif wrong := [name for name in args.methods if name not in WITHOUT_HOROVOD]:
            parser.error(
                f"--methods {','.join(wrong)}: Horovod's, which --launcher torchrun does without; there are "
                f"{', '.join(name for name in args.known if name in WITHOUT_HOROVOD)}"
            )
    args.command = " ".join(["python launch/bench", *what(argv)])
    return args


def missing() -> list[str]:
    """Parts whose files are not there, or are of another wire version than the code's."""
    return [name for name, part in PARTS.items() if not all(is_current(load(FOLDER / file)) for file in part.writes)]


def _say_missing(args: argparse.Namespace) -> None:
    for name in missing():
        print(f"{name}: about {PARTS[name].minutes} minutes")
    print(f"about {sum(PARTS[name].minutes for name in missing())} minutes in all")


def _draw(args: argparse.Namespace) -> None:
    from bench import report  # needs matplotlib, which machines that only measure may lack

    report.draw(DOCS)


def described(add_arguments: Callable[..., None]) -> str:
    """What a part is: by its module, or by its function where a module has several."""
    module = sys.modules[add_arguments.__module__]
    text = str((add_arguments if module is steps else module).__doc__)
    return "\n".join(line.removeprefix("    ") if module is steps else line for line in text.splitlines())


def what(argv: Sequence[str]) -> Iterator[str]:
    """Flags without those that say where files lie, which is a machine's own."""
    left = iter(argv)
    for flag in left:
        if flag in _WHERE:
            next(left)
        elif not flag.startswith(tuple(f"{name}=" for name in _WHERE)):
            yield flag


def run(args: argparse.Namespace) -> bool:
    """Run a part; whether it succeeded."""
    print(f"bench: {args.command}", flush=True)
    try:
        args.run(args)
    except (RunError, OSError, ValueError, subprocess.SubprocessError) as error:
        print(f"bench: error: {args.part}: {error}", file=sys.stderr)
        return False
    return True


def main(argv: Sequence[str] | None = None) -> None:
    args = parse(sys.argv[1:] if argv is None else argv)
    come_down_on_signals()
    if args.quick:
        names = [name for name, part in PARTS.items() if part.quick]
    else:
        names = [name for name, part in PARTS.items() if part.writes] if args.all else missing()
    chosen = [args] if args.part else [parse([name], quick=args.quick) for name in names]
    if not args.part and not args.quick:
        chosen.append(parse(["draw"]))
    if failed := [one.part for one in chosen if not run(one)]:
        print(f"bench: error: failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
