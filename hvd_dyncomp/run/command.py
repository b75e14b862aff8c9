"""The command: its arguments, and the program as Python itself would run it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import runpy

from hvd_dyncomp.levels import LEVELS, UNCOMPRESSED
from hvd_dyncomp.run.comparison import STEPS_PER_VISIT, WARM_UP
from hvd_dyncomp.transport.launched import processes

ALONE = "one process exchanges nothing: the program runs as it is (start it by torchrun, horovodrun, mpirun or srun)"


def _level(text: str) -> float:
    try:
        return LEVELS[LEVELS.index(float(text))]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(map(str, LEVELS))}, got {text!r}") from None


def _levels(text: str) -> list[float]:
    return list(dict.fromkeys(map(_level, text.split(","))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. All that stand after the program are the program's.

    Args:
        parser: of the command; best with `allow_abbrev=False`.
    """
    parser.set_defaults(parser=parser)
    parser.add_argument("--level", type=_level, default=4, metavar="BITS", help="bits per value; default: 4")
    parser.add_argument("--compare", action="store_true", help="at first compare steps at several levels, in turns")
    parser.add_argument("--levels", type=_levels, metavar="BITS,...", help="to compare; default: 32, --level and 0.25")
    parser.add_argument("--steps", type=int, default=200, metavar="N", help="that compare; default: 200")
    parser.add_argument("--then", choices=("go", "stop"), default="go", help="after them; default: go on at --level")
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as with python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="of the program")


def main(args: argparse.Namespace) -> int:
    """Run a program with its models compressed, and say on rank 0 what was saved.

    Args:
        args: what a parser with `add_arguments` has returned.

    Returns:
        0. What the program raises is raised, `SystemExit` too.

    Raises:
        SystemExit: with status 2 and a message, for arguments that do not fit; with 0, after `--then stop`.
    """
    from hvd_dyncomp.run.models import Models, say  # late: with torch's compiler, which --help does without
    from hvd_dyncomp.run.patches import changed

    levels = (args.levels or _levels(f"{UNCOMPRESSED},{args.level},0.25")) if args.compare else []
    least = WARM_UP + STEPS_PER_VISIT * len(levels)
    if args.compare and args.steps < least:
        args.parser.error(f"argument --steps: {len(levels)} levels need at least {least}, got {args.steps}")
    if not args.module and not os.path.exists(args.program):
        args.parser.error(f"no such file: {args.program}")
    alone = processes() == 1
    if alone:
        say(ALONE)
    models = Models(args.level, levels, args.steps, stops=args.then == "stop")
    folder = None if args.module else os.path.dirname(os.path.realpath(args.program))
    with changed(models, [args.program, *args.arguments], folder, compress=not alone):
        if args.module and not _is_there(args.program):
            args.parser.error(f"no module named {args.program}")
        try:
            if args.module:
                runpy.run_module(args.program, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(args.program, run_name="__main__")
        finally:
            if not alone:
                models.report()
    return 0


def _is_there(module: str) -> bool:
    """Whether there is a module. Parent packages are imported, as `python -m` does."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            return False
        raise
