"""Fits a model of a step's costs to what other parts have measured, and predicts steps on more hosts. Measures nothing.

    python launch/bench growth --unseen 2x4@1gbit

Reads DIR/kernels.json and all DIR/exchange-*.json that were run on CPUs and over MPI; 2x4@1gbit are two hosts of four
workers each at 1 Gbit/s, whose steps the fit does not see and is checked against. Writes DIR/growth.json;
launch/bench/cost_model.py has the model. Predictions are for hosts with a core for each worker.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench import cost_fit, cost_model, cost_predictions, gpus, growth_page, kernels
from bench.collectives import Hosts
from bench.cost_fit import Fit, Point
from bench.cost_step import step
from bench.results import FOLDER, SHARED_MEMORY, commit, load, save, today
from common.errors import RunError
from common.values import count, level, listed
from netlab.shaping import bits_per_second

FILE = "growth.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this part can be told, and its defaults."""
    parser.set_defaults(run=run)
    add = parser.add_argument
    add("--unseen", type=listed(_unseen), default="2x4@1gbit", metavar="HxL@RATE,...", help="default 2x4@1gbit")
    add("--values", type=count, default=25557032, metavar="N", help="of the model in predictions (default ResNet-50's)")
    add("--bits", type=level, default=4, help="of ours in predictions (default 4)")
    add("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"of all JSON files (default {FOLDER})")


def _unseen(text: str) -> str:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*@\w+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a layout and a rate such as 2x4@1gbit")
    return text


def run(args: argparse.Namespace) -> None:
    """Fit, check, predict, write the JSON file and show it as Markdown.

    Raises:
        RunError: too little has been measured.
    """
    nanoseconds = kernel_times(load(args.output_dir / kernels.FILE))
    files = [load(path) for path in sorted(args.output_dir.glob("exchange-*.json"))]
    everything = [point for results in files if not gpus.on_gpus(results) for point in points(results)]
    seen, unseen = apart(everything, args.unseen)
    found = cost_fit.fit(seen, nanoseconds)
    results = {
        "command": args.command,
        "commit": commit(),
        "date": today(),
        "values": args.values,
        "bits": args.bits,
        "constants": {name: [found.constants[name], found.errors[name]] for name in cost_model.UNITS},
        "seen": [_compared(point, found, nanoseconds) for point in seen],
        "unseen": [_compared(point, found, nanoseconds) for point in unseen],
        "predicted": cost_predictions.layouts(found.constants, nanoseconds, args.values, args.bits),
        "messages": cost_predictions.buckets(found.constants, nanoseconds, args.values, args.bits),
        "assumed_ms": cost_predictions.ASSUMED_MS,
    }
    save(args.output_dir / FILE, results)
    print("\n\n".join([*growth_page.measured(results), *growth_page.predicted(results)]))


def kernel_times(results: Mapping[str, Any]) -> dict[str, float]:
    """Nanoseconds per value, medians, of what the part "kernels" has measured."""
    if not results:
        raise RunError(f"no {kernels.FILE}: run the part kernels first")
    return {name: statistics.median(times) for name, times in results["nanoseconds"].items()}


def points(results: Mapping[str, Any]) -> Iterator[Point]:
    """The steps that one file of the exchange benchmark has, where the model knows the method."""
    per_host = results.get("workers_per_host", 1)
    for rate, found in results["rates"].items():
        about = found.get("about", {})
        if "machine" not in about or about.get("launcher") == "gloo":  # cut off; other algorithms
            continue
        together = rate == SHARED_MEMORY
        hosts = Hosts(1, results["workers"]) if together else Hosts(results["workers"] // per_host, per_host)
        machine = cost_model.Machine(hosts, about["machine"]["cores"] / hosts.number, _payload(rate, about))
        for method, measured in found["contenders"].items():
            steps = step(method, results["values"], hosts)
            if steps is not None:
                label = f"{hosts.number}x{hosts.workers}", rate, method
                yield Point(label, steps, machine, statistics.median(measured["ms"]) / 1e3)


def _payload(rate: str, about: Mapping[str, Any]) -> float:
    """Bits of payload in a second: what a plain TCP transfer reached before the benchmark, or what it should."""
    if rate == SHARED_MEMORY:
        return math.inf
    reached = about.get("payload_mbit")
    return 1e6 * reached if reached else (bits_per_second(rate) or math.inf) * cost_model.PAYLOAD


def apart(everything: list[Point], unseen: tuple[str, ...]) -> tuple[list[Point], list[Point]]:
    """What is fitted, and what is kept from the fit.

    Raises:
        RunError: something that is to be kept has not been measured, or the rest does not tell all constants.
    """
    kept: dict[str, list[Point]] = {place: [] for place in unseen}
    seen: list[Point] = []
    for point in everything:
        layout, rate, _ = point.label
        kept.get(f"{layout}@{rate}", seen).append(point)
    for place, found in kept.items():
        if not found:
            raise RunError(f"{place} has not been measured: run the part hosts first, or tell --unseen another")
    untold = cost_fit.untold(seen)
    if untold:
        raise RunError(f"nothing measured tells {', '.join(untold)} of the model: run the parts exchange and hosts")
    return seen, [point for found in kept.values() for point in found]


def _compared(point: Point, found: Fit, nanoseconds: Mapping[str, float]) -> dict[str, Any]:
    layout, rate, method = point.label
    predicted_ms = 1e3 * cost_model.seconds(point.step, point.machine, found.constants, nanoseconds)
    return {
        "layout": layout,
        "rate": rate,
        "contender": method,
        "ms": round(1e3 * point.seconds, 3),
        "predicted_ms": round(predicted_ms, 3),
    }
