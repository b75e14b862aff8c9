"""Trains with auto_level on a link whose rate changes, and compares with constant levels.

In each phase the link may have another rate. The constant levels take turns for some seconds, whose medians stand for
all steps of the phase. Then the quantizer with auto_level and at least 4 bits takes these steps in a row: all that it
tries is in its time. Writes DIR/changing-MODEL.json, of a link that has one rate in all phases
DIR/changing-MODEL-RATE.json, and shows it as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import workloads
from bench.results import SHARED_MEMORY, about, load, origin, save, typed
from bench.start import environment_of, start, worker
from bench.steps import add_shared_arguments, checked_rate
from bench.tables import by_rate, rate_title, title
from common.markdown import markdown
from common.values import at_least_zero, count, listed
from hvd_dyncomp.commands.probe.methods import AUTO
from netlab.hosts import WITH_HOROVOD, hosts

_CONSTANT = ("none", "4bit", "8bit", "16bit")
_PHASES = "10gbit:200,100mbit:100,1gbit:200,10gbit:200,100mbit:100,1gbit:200"  # about a minute each of ResNet-18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--model", choices=workloads.TRAINING_MODELS, default="resnet18", help="default resnet18")
    add("--phases", type=_phases, default=_PHASES, metavar="RATE:STEPS,...", help=f"default {_PHASES}")
    add("--seconds", type=at_least_zero, default=20.0, metavar="S", help="of the constant levels (default 20)")
    add_shared_arguments(parser, WITH_HOROVOD)


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
    rates = {rate for rate, _ in args.phases}
    name = "-".join(["changing", args.model, *(rates if len(rates) == 1 else ())])
    note = about(args.command, args.seed, environment, args.launcher)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, hosts() as lab:
        file = Path(folder, "phases.json")
        try:
            start(
                lab.command(worker("changing_worker", {**spec, "file": str(file)}), launcher=args.launcher), environment
            )
        finally:
            results = {"benchmark": "changing", "model": args.model, "about": note, **load(file)}
            save(args.output_dir / f"{name}.json", results)
    print(report(results))


def report(results: Mapping[str, Any]) -> str:
    """Markdown: for each rate in turn the seconds of its steps and the bits per value sent, and the same of all."""
    phases = results["phases"]
    parts = [list(part) for _, part in itertools.groupby(phases, key=lambda phase: phase["rate"])]
    rows = [_row(rate_title(part[0]["rate"]), part, results["values"]) for part in parts]
    if len(parts) > 1:
        rows.append(_row("all", phases, results["values"]))
    return (
        f"{_table(results, rows)}\n\n`{typed(results['about']['command'])}`: two workers; the constant levels' median "
        f"steps times their number.{origin([results['about']])}"
    )


def summary(files: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a row for each file, with all of its steps. The links that keep their rate come first."""
    rows = {}
    for results in files:
        rates = list(dict.fromkeys(phase["rate"] for phase in results["phases"]))
        what = rate_title(rates[0]) if len(rates) == 1 else "changing"
        rows[len(rates), by_rate(rates[0])] = _row(what, results["phases"], results["values"])
    return _table(files[0], [row for _, row in sorted(rows.items())]) if files else ""


def _table(results: Mapping[str, Any], rows: list[tuple[str, ...]]) -> str:
    names = results["phases"][0]["contenders"]
    head = (f"{results['model']}: seconds (bits per value)", "steps", *map(title, names), "auto against the best")
    return markdown(head, rows)


def _spent(measured: Mapping[str, Any], steps: int, values: int) -> tuple[float, float]:
    """Seconds of so many steps, of which all or some were measured; and bits per value, summed over the steps."""
    everything = len(measured["ms"]) >= steps
    middle = statistics.fmean if everything else statistics.median
    sent = [8 * statistics.fmean(step) / values for step in measured["sent"]]
    return steps * middle(measured["ms"]) / 1e3, steps * middle(sent)


def _row(what: str, phases: Iterable[Mapping[str, Any]], values: int) -> tuple[str, ...]:
    """The sums over phases; the best is the constant level with the shortest sum."""
    steps, found = 0, dict[str, tuple[float, float]]()
    for phase in phases:
        steps += phase["steps"]
        for name, measured in phase["contenders"].items():
            before, now = found.get(name, (0.0, 0.0)), _spent(measured, phase["steps"], values)
            found[name] = before[0] + now[0], before[1] + now[1]
    cells = [f"{seconds:.1f} ({bits / steps:.1f})" for seconds, bits in found.values()]
    best = min(seconds for name, (seconds, _) in found.items() if name != AUTO)
    return (what, f"{steps}", *cells, f"{found[AUTO][0] / best:.2f}")
