"""Times the exchange of a model's gradients, and nothing else, at several link rates.

    python launch/bench.py --part exchange --rates 100mbit,1gbit,10gbit,none,shm

A step is a backward pass that hands over gradients which lie ready, the exchange, and the optimizer's update. All
methods take turns in one process group. Writes DIR/exchange-MODEL-WORKERS.json, with --workers-per-host
DIR/exchange-MODEL-HOSTSxWORKERS.json, and shows it as Markdown.
"""

from __future__ import annotations

import argparse

from benchmarks import contenders, tables, workloads
from benchmarks import run as runs
from benchmarks.results import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.epilog = contenders.__doc__
    models = workloads.EXCHANGE_MODELS
    parser.add_argument("--model", choices=models, default="resnet50", help="whose tensors (default resnet50)")
    runs.add_workers(parser)
    runs.add_arguments(parser, contenders=contenders.DEFAULT, rates="100mbit,1gbit,10gbit,none,shm", seconds=60)


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON file and show it as Markdown. Raises what `benchmarks.run.run` does."""
    results = load(runs.run("exchange", args.model, args))
    parts = [tables.times(results), tables.bits(results), tables.caption(results)]
    print("\n\n".join(part for part in parts if part))
