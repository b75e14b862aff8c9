"""What launch/study.py does: the declared study, the paper on real ranks, or trainings of a reader's choice."""

from __future__ import annotations

import argparse
import sys

from common.errors import RunError
from common.values import Parser
from screening import program as screen
from studies import paper, study

SIMULATIONS = {"screen": screen}


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    # Without --help: that belongs to whatever has been chosen.
    parser = Parser(prog="study.py", add_help=False, allow_abbrev=False)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--simulate", choices=SIMULATIONS)
    which.add_argument("--paper", action="store_true")
    chosen, flags = parser.parse_known_args(argv)
    if chosen.paper:
        return paper.main(flags)
    if chosen.simulate is None:
        try:
            return study.main(flags)
        except (RunError, OSError) as error:
            parser.error(str(error))
    simulation = SIMULATIONS[chosen.simulate]
    prog, raw = f"study.py --simulate {chosen.simulate}", argparse.RawDescriptionHelpFormatter
    parser = Parser(prog=prog, description=simulation.__doc__, formatter_class=raw, allow_abbrev=False)
    simulation.add_arguments(parser)
    try:
        simulation.run(parser.parse_args(flags))
    except (RunError, OSError) as error:
        parser.error(str(error))
