"""Runs the benchmarks and redraws the tables and figures of what is in docs/data/bench/.

    python launch/bench                              # everything: about 40 minutes on two cores
    python launch/bench --quick                      # a few steps of each kind, into runs/quick: ten minutes
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

from bench import changing, curves, kernels, memory, steps, time_to_accuracy
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
    """A benchmark: what adds its flags, and says by its docstring what it is; other defaults of these flags; and
    defaults for ``--quick``, if it takes part in that.
    """

    add_arguments: Callable[[argparse.ArgumentParser], None]
    defaults: Mapping[str, str] = field(default_factory=dict)
    quick: Mapping[str, str] = field(default_factory=dict)


_MANY = {"rates": "1gbit", "methods": "none,fp16,1bit,4bit,8bit", "seconds": "30", "model": "resnet18"}
_FEW = {"methods": "alone,none,fp16,0.25bit,1bit,4bit,powersgd1", "rounds": "8", "seconds": "20"}
_SHARDED = {
    **{"models": "transformer-short", "workers": "4", "workers_per_host": "2", "rates": "100mbit,1gbit,none,shm"},
    **{"methods": "shards-alone,hsdp,hsdp-bf16,4bit-fsdp,0.25bit-fsdp", "seconds": "120"},
}
PARTS = {
    "kernels": Part(kernels.add_arguments, quick={"values": str(2**22), "rounds": "3"}),
    "exchange": Part(steps.exchange, quick={"rates": "100mbit,1gbit,shm", **_FEW}),
    "bytes4": Part(steps.exchange, {"workers": "4", **_MANY}),
    "bytes8": Part(steps.exchange, {"workers": "8", **_MANY}),
    "hosts": Part(
        steps.on_hosts,
        quick={"model": "resnet18", "layouts": "2x2", "rates": "1gbit", "seconds": "20"},
    ),
    "training": Part(
        steps.training,
        quick={"models": "resnet20,mlp", "rates": "100mbit", **_FEW},
    ),
    "sharded": Part(
        steps.training,
        _SHARDED,
        {"rates": "100mbit,shm", "seconds": "20", "rounds": "8"},
    ),
    "accuracy": Part(
        time_to_accuracy.add_arguments,
        quick={"model": "resnet8", "epochs": "2", "limit_train": "3000", "lr": "0.05", "tolerance": "5"},
    ),
    "changing": Part(changing.add_arguments, quick={"phases": "none:4,100mbit:4", "steps": "5"}),
    "curves": Part(
        curves.add_arguments,
        {"launcher": TORCHRUN},
        {"models": "resnet8,tiny", "steps": "40"},
    ),
    "memory": Part(
        memory.add_arguments,
        quick={"values": str(2**24), "layouts": "2", "methods": "none,4bit"},
    ),
}


def parse(argv: Sequence[str], *, quick: bool = False) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line.

    Args:
        argv: as in argparse.
        quick: parts do as little as with ``--quick``.
    """
    look: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="bench", description=__doc__, **look)
    parser.add_argument("--quick", action="store_true", help=f"a few steps of most parts, into {QUICK_DIR}; not drawn")
    parts = parser.add_subparsers(dest="part", metavar="PART")
    for name, part in PARTS.items():
        about = described(part.add_arguments)
        own = parts.add_parser(name, description=about, help=about.partition(".\n")[0], **look)
        part.add_arguments(own)
        own.set_defaults(**{**part.defaults, **({**part.quick, "output_dir": str(QUICK_DIR)} if quick else {})})
    parts.add_parser("draw", help="measure nothing").set_defaults(run=_draw)
    args = parser.parse_args(argv)
    if args.part and args.quick:
        parser.error(f"--quick is for all parts, not for {args.part}")
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
    names = [name for name, part in PARTS.items() if part.quick or not args.quick]
    chosen = [args] if args.part else [parse([name], quick=args.quick) for name in names]
    if not args.part and not args.quick:
        chosen.append(parse(["draw"]))
    if failed := [one.part for one in chosen if not run(one)]:
        print(f"bench: error: failed: {', '.join(failed)}", file=sys.stderr)
        raise SystemExit(2)


if __name__ == "__main__":
    main()
