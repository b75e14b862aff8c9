"""Times real training steps at several link rates.

    python launch/bench.py --part training --models resnet20,mlp --rates 100mbit,1gbit

Forward, backward, exchange and update of each model; all methods take turns in one process group. Writes
DIR/training-MODEL-WORKERS.json, with --workers-per-host DIR/training-MODEL-HOSTSxWORKERS.json, and shows it as
Markdown.
"""

from __future__ import annotations

import argparse

from benchmarks import contenders, tables, workloads
from benchmarks import run as runs
from benchmarks.results import load

_CONTENDERS = ("alone", "none", "fp16", "0.25bit", "1bit", "2bit", "4bit", "8bit", "ddp", "ddp-fp16", "powersgd1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.epilog = contenders.__doc__
    every = ",".join(model for model in workloads.TRAINING_MODELS if model not in ("tiny", "transformer-short"))
    parser.add_argument("--models", type=_models, default=every, metavar="NAME,...", help=f"default {every}")
    runs.add_workers(parser)
    runs.add_arguments(parser, contenders=_CONTENDERS, rates="100mbit,1gbit,10gbit,shm", seconds=25)


def _models(text: str) -> tuple[str, ...]:
    for model in text.split(","):
        if model not in workloads.TRAINING_MODELS:
            raise argparse.ArgumentTypeError(f"{model!r} is not one of {', '.join(workloads.TRAINING_MODELS)}")
    return tuple(text.split(","))


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON files and show them as Markdown. Raises what `benchmarks.run.run` does."""
    for model in args.models:
        results = load(runs.run("training", model, args))
        parts = [tables.times(results), tables.bits(results), tables.caption(results)]
        print("\n\n".join(part for part in parts if part), flush=True)
