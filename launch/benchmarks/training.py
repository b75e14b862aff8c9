"""Times real training steps at several link rates, or whole trainings until they have learned enough.

    python launch/bench_training.py --models resnet20,mlp --rates 100mbit,1gbit
    python launch/bench_training.py --time-to-accuracy --rate 100mbit

Steps: forward, backward, exchange and update of each model; all contenders take turns in one process group. Writes
DIR/training-MODEL-WORKERS.json. With --time-to-accuracy: launch/train_resnet.py on Fashion-MNIST, one run after the
other; writes DIR/accuracy.json.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from benchmarks import contenders, run, tables, time_to_accuracy, workloads
from benchmarks.results import load
from common.course import RunError
from common.values import Parser
from lab.hosts import come_down_on_signals

_CONTENDERS = ("alone", "none", "fp16", "1bit", "2bit", "4bit", "8bit", "ddp", "ddp-fp16", "powersgd1")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse a command line; a bad one ends with status 2 after one line."""
    epilog = contenders.__doc__
    raw = argparse.RawDescriptionHelpFormatter
    parser = Parser(prog="bench_training.py", description=__doc__, epilog=epilog, formatter_class=raw)
    every = ",".join(model for model in workloads.TRAINING_MODELS if model != "tiny")
    parser.add_argument("--models", default=every, metavar="NAME,...", help=f"default {every}")
    run.add_arguments(parser, contenders=_CONTENDERS, rates="100mbit,1gbit,10gbit,shm", seconds=25)
    time_to_accuracy.add_arguments(parser)
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    for model in args.models:
        if model not in workloads.TRAINING_MODELS:
            parser.error(f"--models: {model!r} is not one of {', '.join(workloads.TRAINING_MODELS)}")
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    come_down_on_signals()
    try:
        if args.time_to_accuracy:
            print(time_to_accuracy.table(load(time_to_accuracy.run(args))))
            return
        for model in args.models:
            results = load(run.run("training", model, args))
            print(f"{tables.times(results)}\n\n{tables.caption(results)}\n", flush=True)
    except (RunError, OSError, ValueError, subprocess.TimeoutExpired) as error:
        print(f"bench_training.py: error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
