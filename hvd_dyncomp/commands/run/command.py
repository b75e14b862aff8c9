"""The command: its arguments, and the program as Python itself would run it."""

from __future__ import annotations

import argparse
import os
import shlex

from hvd_dyncomp.commands.run.comparison import STEPS_PER_VISIT, WARM_UP
from hvd_dyncomp.commands.run.program import run
from hvd_dyncomp.levels import UNCOMPRESSED, level_argument, levels_argument
from hvd_dyncomp.transport.launched import processes

STEPS = 200
COMPARES = "comparing steps at {} bits: the program stops after {} steps; do not use what it trains or saves in them"
ALONE = "one process exchanges nothing: the program runs as it is (start it by torchrun, horovodrun, mpirun or srun)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments. All that stand after the program are the program's.

    Args:
        parser: of the command; best with `allow_abbrev=False`.
    """
    parser.set_defaults(parser=parser)
    parser.usage = f"{parser.prog} [--level BITS] [--compare [--levels ...] [--steps N]] [-m] PROGRAM ARGS"
    parser.add_argument("--level", type=level_argument, default=4, metavar="BITS", help="bits per value; default: 4")
    parser.add_argument("--compare", action="store_true", help="time steps at several levels, then stop")
    parser.add_argument(
        "--levels", type=levels_argument, metavar="BITS,...", help="levels to compare; default: 32, --level and 0.25"
    )
    parser.add_argument("--steps", type=int, metavar="N", help=f"steps of the comparison; default: {STEPS}")
    parser.add_argument("--then", type=_gone, help=argparse.SUPPRESS)
    parser.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module, as with python -m")
    parser.add_argument("program", metavar="PROGRAM", help="a file, or with -m a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="arguments of the program")


def main(args: argparse.Namespace) -> int:
    """Run a program with its models compressed, and say on rank 0 what was saved.

    Args:
        args: what a parser with `add_arguments` has returned.

    Returns:
        0. What the program raises is raised, `SystemExit` too.

    Raises:
        SystemExit: with status 2 and a message, for arguments that do not fit; with 0, after a comparison.
    """
    from hvd_dyncomp.commands.run.models import (
        Models,
        say,
        speaks,
    )  # late: with torch's compiler, which --help does without
    from hvd_dyncomp.commands.run.patches import changed

    levels, steps = _compared(args)
    if not args.module and not os.path.exists(args.program):
        args.parser.error(f"no such file: {args.program}")
    if processes() == 1:
        say(ALONE)
        run(args.program, args.arguments, module=args.module)
        return 0
    program = shlex.join([*(["-m"] if args.module else []), args.program, *args.arguments])
    models = Models(args.level, levels, steps, command=f"-m hvd_dyncomp run --level BITS {program}")
    if levels and speaks():
        say(COMPARES.format(", ".join(f"{bits:g}" for bits in levels), steps))
    with changed(models):
        try:
            run(args.program, args.arguments, module=args.module)
        finally:
            models.report()
    return 0


def _gone(value: str) -> str:
    raise argparse.ArgumentTypeError(f"a comparison now always stops the program; leave out --then {value}")


def _compared(args: argparse.Namespace) -> tuple[list[float], int]:
    """The levels that are compared, none without `--compare`, and the number of steps."""
    if not args.compare:
        if (args.levels, args.steps) != (None, None):
            args.parser.error("--levels and --steps belong to --compare")
        return [], 0
    levels = args.levels or levels_argument(f"{UNCOMPRESSED},{args.level},0.25")
    steps, least = STEPS if args.steps is None else args.steps, WARM_UP + STEPS_PER_VISIT * len(levels)
    if steps < least:
        args.parser.error(f"argument --steps: {len(levels)} levels need at least {least}, got {steps}")
    return levels, steps
