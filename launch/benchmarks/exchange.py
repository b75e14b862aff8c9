"""Times the exchange of a model's gradients, and nothing else, at several link rates.

    python launch/bench_exchange.py --rates 100mbit,1gbit,10gbit,none,shm

A step is a backward pass that hands over gradients which lie ready, the exchange, and the optimizer's update. All
contenders take turns in one process group. Writes DIR/exchange-MODEL-WORKERS.json and shows it as Markdown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import contenders, run, tables, workloads
from benchmarks.results import load
from common.course import RunError
from common.values import Parser
from lab.hosts import come_down_on_signals


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line."""
    epilog = contenders.__doc__
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="bench_exchange.py", description=__doc__, epilog=epilog, formatter_class=raw)
    models = workloads.EXCHANGE_MODELS
    parser.add_argument("--model", choices=models, default="resnet50", help="whose tensors (default resnet50)")
    rates = "100mbit,1gbit,10gbit,none,shm"
    run.add_arguments(parser, contenders=contenders.DEFAULT, rates=rates, seconds=60)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    come_down_on_signals()
    try:
        results = load(run.run("exchange", args.model, args))
    except (RunError, OSError, subprocess.TimeoutExpired) as error:
        print(f"bench_exchange.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    parts = [tables.times(results), tables.bits(results), tables.caption(results)]
    print("\n\n".join(part for part in parts if part))


if __name__ == "__main__":
    main()
