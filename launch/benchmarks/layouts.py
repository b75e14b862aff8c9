"""Times the exchange of a model's gradients on hosts of several workers, where one interface serves all of a host.

    python launch/bench.py --part hosts --layouts 2x2,2x4 --rates 100mbit,1gbit

A layout is HOSTSxWORKERS, workers of each host. What is timed, and how, is as in --part exchange; bits per value are
those that a host's interface sent. Writes DIR/exchange-MODEL-LAYOUT.json and shows it as Markdown.
"""

from __future__ import annotations

import argparse
import re

from benchmarks import contenders, tables, workloads
from benchmarks import run as runs
from benchmarks.results import load

_BITS = ("1bit", "2bit", "4bit", "8bit")
_FLAT = tuple(contenders.ONE_LEVEL[name] for name in _BITS)
_CONTENDERS = ("none", "fp16", *_BITS, *_FLAT, "ddp", "ddp-fp16", "powersgd1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.epilog = contenders.__doc__
    models = workloads.EXCHANGE_MODELS
    parser.add_argument("--model", choices=models, default="resnet50", help="whose tensors (default resnet50)")
    parser.add_argument("--layouts", type=_layouts, default="2x2,2x4", metavar="HxL,...", help="default 2x2,2x4")
    runs.add_arguments(parser, contenders=_CONTENDERS, rates="100mbit,1gbit", seconds=60)


def _layouts(text: str) -> tuple[tuple[int, int], ...]:
    found = [re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", part) for part in text.split(",")]
    layouts = tuple((int(match[1]), int(match[2])) for match in found if match)
    if len(layouts) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not HOSTSxWORKERS, separated by commas")
    return layouts


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON files and show them as Markdown. Raises what `benchmarks.run.run` does."""
    for hosts, workers in args.layouts:
        args.workers, args.workers_per_host = hosts * workers, workers
        results = load(runs.run("exchange", args.model, args))
        parts = [tables.times(results), tables.gains(results), tables.bits(results), tables.caption(results)]
        print("\n\n".join(part for part in parts if part), flush=True)
