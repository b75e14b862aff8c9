"""Markdown tables of the benchmarks' JSON files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench import gpus
from bench.results import SHARED_MEMORY, Summary, origin, summarize, typed
from bench.steppers import ACCUMULATED, ACCUMULATES, BATCHES
from common.markdown import DASH, markdown
from hvd_dyncomp.commands.probe.methods import ONE_LEVEL
from netlab.shaping import bits_per_second

_BUSY = 5.0  # percent of all cores
TITLES = {
    "alone": "no exchange",
    "none": "Horovod",
    "fp16": "Horovod fp16",
    "ddp": "DDP",
    "ddp-defaults": "DDP without arguments",
    "ddp-fp16": "DDP fp16 hook",
    "ddp-bf16": "DDP bf16 hook",
    "powersgd1": "DDP PowerSGD r1",
    "powersgd4": "DDP PowerSGD r4",
    "shards-alone": "FSDP2, no exchange between hosts",
    "hsdp": "FSDP2",
    "hsdp-bf16": "FSDP2 bfloat16",
}
_KINDS = {  # of ours
    **{"": "", "-flat": ", flat", "-ddp": ", DDP", "-fsdp": ", FSDP2"},
    "-ddp-defaults": ", DDP without arguments",
}


def title(method: str) -> str:
    """How a method is called in tables and plots."""
    if method in TITLES:
        return TITLES[method]
    if method in ACCUMULATED:
        return f"{title(method.removesuffix(ACCUMULATES))}, every {BATCHES}th batch"
    bits, _, kind = method.partition("bit")
    return f"ours, {bits} {'bit' if float(bits) <= 1 else 'bits'}{_KINDS[kind]}"


def bits_of(method: str) -> float | None:
    """The level of one of ours with Horovod by default (not flat on purpose); None for all others."""
    bits, suffix, kind = method.partition("bit")
    return float(bits) if suffix and not kind else None


def rate_title(rate: str) -> str:
    """How a rate is called."""
    if rate == SHARED_MEMORY:
        return "shared memory"
    bits = bits_per_second(rate)
    if bits is None:
        return "no limit"
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def by_rate(rate: str) -> float:
    """Sorts rates from slow to fast, shared memory last."""
    return float("inf") if rate == SHARED_MEMORY else bits_per_second(rate) or 1e15


def summaries(results: Mapping[str, Any]) -> dict[str, dict[str, Summary]]:
    """Rate, from slow to fast, to method to figures."""
    return {
        rate: {
            name: summarize(measured, results["values"], BATCHES if name in ACCUMULATED else 1)
            for name, measured in results["rates"][rate]["contenders"].items()
        }
        for rate in sorted(results["rates"], key=by_rate)
    }


def methods_of(rates: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """All methods, in the order of their first appearance."""
    return list(dict.fromkeys(name for found in rates.values() for name in found))


def times(results: Mapping[str, Any], shown: Callable[[Summary], str] = str) -> str:
    """One row per method: median and quartiles of a step at every rate, or what else is to be shown of them."""
    rates = summaries(results)
    rows = [
        (title(name), *(shown(found[name]) if name in found else DASH for found in rates.values()))
        for name in methods_of(rates)
    ]
    return markdown(("ms per step", *map(rate_title, rates)), rows)


def gains(results: Mapping[str, Any]) -> str:
    """One row for each of ours: how many times the step of others takes as long; Horovod's, and the flat exchange's."""
    rates = summaries(results)
    rows = []
    for name, flat in ONE_LEVEL.items():
        others = ("none", "fp16", flat)
        cells = [_gain(found, name, other) for found in rates.values() for other in others]
        if any(cell != DASH for cell in cells):
            rows.append((title(name), *cells))
    head = [f"{other}, {rate_title(rate)}" for rate in rates for other in (title("none"), title("fp16"), "flat")]
    return markdown(("times as fast as", *head), rows) if rows else ""


def _gain(found: Mapping[str, Summary], name: str, other: str) -> str:
    return f"{found[other].median / found[name].median:.2f}" if name in found and other in found else DASH


def hosts_of(results: Mapping[str, Any]) -> tuple[int, int]:
    """Hosts, and workers of each; files from before there were several have one."""
    per_host = results.get("workers_per_host", 1)
    return results["workers"] // per_host, per_host


def layout_title(results: Mapping[str, Any]) -> str:
    """How many workers there were, and where."""
    hosts, per_host = hosts_of(results)
    return f"{hosts} workers" if per_host == 1 else f"{hosts} hosts of {per_host} workers"


def bits(results: Mapping[str, Any]) -> str:
    """One row per method: bits per value that a host sent, by its interface's counter; beside ours, the goal.

    The goal at level b is (b + 0.15) * 2(H - 1)/H for H hosts, however many workers each has. "" where nothing was
    counted.
    """
    hosts, per_host = hosts_of(results)
    rates = {
        rate: found for rate, found in summaries(results).items() if any(s.bits is not None for s in found.values())
    }
    rows = []
    for name in methods_of(rates):
        if name != "alone":
            sent = [found[name].bits if name in found else None for found in rates.values()]
            level = bits_of(name.removesuffix("-ddp").removesuffix("-fsdp"))
            goal = "" if level is None else f"{(level + 0.15) * 2 * (hosts - 1) / hosts:.2f}"
            rows.append((title(name), goal, *(DASH if number is None else f"{number:.2f}" for number in sent)))
    sender = "worker" if per_host == 1 else "host"
    return markdown((f"bits per value and {sender}", "goal", *map(rate_title, rates)), rows) if rates else ""


def caption(results: Mapping[str, Any], cells: str = "median (quartiles)") -> str:
    """What was measured, how often, and with what; `cells`: what the table has of the steps."""
    rates = summaries(results)
    steps = [s.steps for found in rates.values() for s in found.values()]
    # A run that was cut off has rates without a description.
    notes = [found.get("about", {}) for found in results["rates"].values()]
    commands = dict.fromkeys(f"`{typed(note['command'])}`" for note in notes if "command" in note)
    environments = [note.get("environment", {}) for note in notes]
    cycles = ", ".join(dict.fromkeys(one["HOROVOD_CYCLE_TIME"] for one in environments if "HOROVOD_CYCLE_TIME" in one))
    busiest = max((note.get("busy_before_percent", 0) for note in notes), default=0)
    devices = "".join(dict.fromkeys(gpus.sentence(note, results["workers"]) for note in notes))
    busy = f" The machine was busy with something else ({busiest:.0f} %)." if busiest > _BUSY else ""
    return (
        f"{', '.join(commands)}: {results['model']}, {results['tensors']} tensors, "
        f"{results['values'] / 1e6:.1f} million values, {layout_title(results)}; {cells} of "
        f"{min(steps)} to {max(steps)} steps, the slowest worker's time counting."
        f"{f' HOROVOD_CYCLE_TIME {cycles} ms for all.' if cycles else ''}{origin(notes)}{devices}{busy}"
    )
