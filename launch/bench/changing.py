"""Trains with auto_level on a link whose rate changes, and compares with constant levels.

In each phase the link has another rate. The constant levels take turns for some seconds, whose medians stand for all
steps of the phase. Then the quantizer with auto_level and at least 4 bits takes these steps in a row: all that it tries
is in its time. Writes DIR/changing-MODEL.json and shows it as Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import workloads
from bench.results import SHARED_MEMORY, about, load, origin, save, typed
from bench.start import environment_of, start, worker
from bench.steppers import AUTO
from bench.steps import add_shared_arguments, checked_rate
from bench.tables import rate_title, title
from common.markdown import markdown
from common.values import at_least_zero, count, listed
from netlab.hosts import hosts

_CONSTANT = ("none", "4bit", "8bit", "16bit")
_PHASES = "10gbit:200,100mbit:100,1gbit:200,10gbit:200,100mbit:100,1gbit:200"  # about a minute each of ResNet-18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", choices=workloads.TRAINING_MODELS, default="resnet18", help="default resnet18")
    add("--phases", type=_phases, default=_PHASES, metavar="RATE:STEPS,...", help=f"default {_PHASES}")
    add("--seconds", type=at_least_zero, default=20.0, metavar="S", help="of the constant levels (default 20)")
    add_shared_arguments(parser)


def _phases(text: str) -> tuple[tuple[str, int], ...]:
    found = listed(_phase)(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no phase")
    return found


def _phase(text: str) -> tuple[str, int]:
    rate, _, steps = text.partition(":")
    if rate == SHARED_MEMORY:
        raise argparse.ArgumentTypeError(f"{rate!r} is no link")
    return checked_rate(rate), count(steps)


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON file and show it as Markdown.

    Raises:
        RunError: the network cannot be made, or a worker failed. What was measured until then is kept.
    """
    environment = environment_of(args)
    spec = {"model": args.model, "methods": _CONSTANT, "auto": AUTO, "seconds": args.seconds, "seed": args.seed}
    spec["phases"] = args.phases
    note = {**about(args.command, args.seed, environment), "launcher": args.launcher}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, hosts() as lab:
        file = Path(folder, "phases.json")
        try:
            start(
                lab.command(worker("changing_worker", {**spec, "file": str(file)}), launcher=args.launcher), environment
            )
        finally:
            results = {"benchmark": "changing", "model": args.model, "about": note, **load(file)}
            save(args.output_dir / f"changing-{args.model}.json", results)
    print(report(results))


def report(results: Mapping[str, Any]) -> str:
    """Markdown: for each phase the seconds of its steps and the bits per value sent, and the same of all phases."""
    names = list(results["phases"][0]["contenders"])
    rows, totals = [], dict.fromkeys(names, (0.0, 0.0))
    every = sum(phase["steps"] for phase in results["phases"])
    for phase in results["phases"]:
        found = {name: _spent(phase["contenders"][name], phase["steps"], results["values"]) for name in names}
        totals = {name: (totals[name][0] + found[name][0], totals[name][1] + found[name][1]) for name in names}
        rows.append(_row(f"{phase['steps']} steps, {rate_title(phase['rate'])}", found, phase["steps"]))
    rows.append(_row("all", totals, every))
    head = ("seconds (bits per value)", *(title(name) for name in names), "auto against the best")
    return (
        f"{markdown(head, rows)}\n\n`{typed(results['about']['command'])}`: two workers, of the constant levels median "
        f"steps, times their number.{origin([results['about']])}"
    )


def _spent(measured: Mapping[str, Any], steps: int, values: int) -> tuple[float, float]:
    """Seconds of so many steps, of which all or some were measured; and bits per value, summed over the steps."""
    everything = len(measured["ms"]) >= steps
    middle = statistics.fmean if everything else statistics.median
    sent = [8 * statistics.fmean(step) / values for step in measured["sent"]]
    return steps * middle(measured["ms"]) / 1e3, steps * middle(sent)


def _row(what: str, found: Mapping[str, tuple[float, float]], steps: int) -> tuple[str, ...]:
    cells = [f"{seconds:.1f} ({bits / steps:.1f})" for seconds, bits in found.values()]
    best = min(seconds for name, (seconds, _) in found.items() if name != AUTO)
    return (what, *cells, f"{found[AUTO][0] / best:.2f}")
