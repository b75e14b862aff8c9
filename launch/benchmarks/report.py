"""Draws the benchmarks' figures and writes their part of docs/benchmarks.md, from whatever JSON files are there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import gpu_kernels, growth, growth_page, kernels, memory, plots, tables, time_to_accuracy
from benchmarks.gpus import on_gpus
from benchmarks.results import Summary, load
from benchmarks.tables import rate_title, summaries, title
from common.errors import RunError
from common.markdown import markdown
from lab.shaping import bits_per_second

BEGIN = "<!-- make bench writes from here -->"
END = "<!-- to here -->"
_Files = list[dict[str, Any]]
_KINDS = ("exchange-", "training-", "accuracy-", "memory")  # what the names of files begin with


def break_even(rates: Mapping[str, Mapping[str, Summary]], name: str, other: str) -> str:
    """Up to which link rate `name` has the shorter steps, in words.

    Between two measured rates the logarithm of the ratio of both times is taken as linear in the logarithm of the rate.
    """
    points = [
        (math.log(bits), math.log(found[name].median / found[other].median))
        for rate, found in rates.items()
        if rate != tables.SHARED_MEMORY and (bits := bits_per_second(rate)) and name in found and other in found
    ]
    if not points:
        return "not measured"
    if all(ratio < 0 for _, ratio in points):
        return f"none found: faster up to {_text(points[-1][0])}"
    if all(ratio >= 0 for _, ratio in points):
        return f"none found: slower from {_text(points[0][0])} on"
    found = [
        _text(x0 + (x1 - x0) * y0 / (y0 - y1))
        for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False)
        if (y0 < 0) != (y1 < 0)
    ]
    return " and ".join(found)


def _text(log_bits: float) -> str:
    bits = float(f"{math.exp(log_bits):.2g}")
    return f"{bits / 1e9:g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:g} Mbit/s"


def break_even_table(results: Mapping[str, Any]) -> str:
    rates = summaries(results)
    ours = [name for name in tables.contenders_of(rates) if tables.bits_of(name) is not None]
    others = [name for name in ("none", "fp16", "ddp") if any(name in found for found in rates.values())]
    rows = [(title(name), *(break_even(rates, name, other) for other in others)) for name in ours]
    return markdown(("break-even link rate", *(f"against {title(other)}" for other in others)), rows)


def links(results: Mapping[str, Any]) -> str:
    """What the links carried, in a sentence."""
    reached = [
        f"{rate_title(rate)}: {note['payload_mbit']:.0f} Mbit/s"
        for rate, found in results["rates"].items()
        if (note := found.get("about", {})).get("payload_mbit")
    ]
    return f"Payload of a plain TCP transfer over the same links: {', '.join(reached)}." if reached else ""


def _gloo(described: Iterable[Mapping[str, Any]]) -> str:
    """What a title says of runs over Gloo; files from before there were any do not name the launcher."""
    launchers = {found.get("about", {}).get("launcher") for found in described}
    return ", Gloo" if "gloo" in launchers else ""


def exchange_section(results: Mapping[str, Any], folder: Path, docs: Path) -> list[str]:
    name = f"exchange-{results['model']}-{results['workers']}"
    parts = [
        f"### The exchange alone: {results['model']}, {tables.layout_title(results)}{_gloo(results['rates'].values())}"
    ]
    bits = tables.bits(results)
    hosts, per_host = tables.hosts_of(results)
    if per_host > 1:
        parts += [tables.times(results), tables.gains(results)]
    elif hosts == 2:
        plots.step_times([results], folder / f"{name}-time.png")
        plots.speed_ups(results, folder / f"{name}-speedup.png")
        shown = folder.relative_to(docs)
        parts += [tables.times(results), break_even_table(results)]
        parts.append(f"![Time per step against link rate]({shown}/{name}-time.png)")
        parts.append(f"![Speed-up against bits per value]({shown}/{name}-speedup.png)")
    return [*parts, bits, tables.caption(results), links(results)]


def training_section(files: list[dict[str, Any]], folder: Path, docs: Path) -> list[str]:
    plots.step_times(files, folder / "training-time.png")
    parts = ["### Training steps", f"![Time per training step]({folder.relative_to(docs)}/training-time.png)"]
    for results in files:
        parts += [tables.times(results), tables.caption(results)]
    return parts


def accuracy_section(results: Mapping[str, Any], folder: Path, docs: Path) -> list[str]:
    figure = folder / time_to_accuracy.figure_name(results)
    plots.accuracies(results, figure)
    return [
        f"### Time to accuracy: {time_to_accuracy.title(results)}",
        time_to_accuracy.table(results),
        time_to_accuracy.caption(results),
        f"![Test accuracy against time]({figure.relative_to(docs)})",
    ]


def gpu_sections(
    arithmetic: Mapping[str, Any], exchanges: _Files, training: _Files, accuracies: _Files, memories: _Files
) -> list[str]:
    """What was measured on GPUs, in tables."""
    parts = []
    if arithmetic:
        parts += ["### On GPUs, arithmetic", gpu_kernels.report(arithmetic)]
    for results in sorted(exchanges, key=_by_hosts):
        where = tables.layout_title(results)
        parts += [f"### On GPUs, the exchange alone: {results['model']}, {where}{_gloo(results['rates'].values())}"]
        parts += [tables.times(results), tables.gains(results), tables.bits(results)]
        parts += [tables.caption(results), links(results)]
    if training:
        parts += ["### On GPUs, training steps"]
    for results in training:
        parts += [tables.times(results), tables.caption(results)]
    for results in accuracies:
        parts += [f"### On GPUs, time to accuracy: {time_to_accuracy.title(results)}"]
        parts += [time_to_accuracy.table(results), time_to_accuracy.caption(results)]
    for results in memories:
        parts += [f"### On GPUs, memory{_gloo([results])}", memory.report(results)]
    return parts


def _by_hosts(results: Mapping[str, Any]) -> tuple[int, int]:
    return tables.hosts_of(results)[1], results["workers"]


def growth_section(results: Mapping[str, Any], folder: Path, docs: Path) -> list[str]:
    plots.deviations(results, folder / "growth-fit.png")
    plots.predictions(results, folder / "growth.png")
    shown = folder.relative_to(docs)
    return [
        "### Growth: a model of what was measured",
        *growth_page.measured(results),
        f"![Predicted against measured times]({shown}/growth-fit.png)",
        "### Growth: predicted, not measured",
        f"![Predicted time per step against hosts]({shown}/growth.png)",
        *growth_page.predicted(results),
    ]


def report(folder: Path, docs: Path) -> str:
    """The generated part, and the figures beside the JSON files in `folder`, which lies in `docs`."""
    parts: list[str] = []
    if (folder / kernels.FILE).exists():
        parts += [
            "### Arithmetic",
            "`python launch/bench.py --part kernels`: " + kernels.report(load(folder / kernels.FILE)),
        ]
    found = {kind: [load(path) for path in sorted(folder.glob(f"{kind}*.json"))] for kind in _KINDS}
    exchanges, training, accuracies, memories = ([one for one in found[kind] if not on_gpus(one)] for kind in _KINDS)
    for results in sorted(exchanges, key=_by_hosts):
        parts += exchange_section(results, folder, docs)
    if training:
        parts += training_section(training, folder, docs)
    for results in accuracies:
        parts += accuracy_section(results, folder, docs)
    for results in memories:
        parts += [f"### Memory{_gloo([results])}", memory.report(results)]
    arithmetic = load(folder / kernels.GPU_FILE)
    parts += gpu_sections(arithmetic, *([one for one in found[kind] if on_gpus(one)] for kind in _KINDS))
    if (folder / growth.FILE).exists():
        parts += growth_section(load(folder / growth.FILE), folder, docs)
    return "\n\n".join(part for part in parts if part)


def insert(page: str, generated: str) -> str:
    """The page with the part between the markers replaced; it gets them at its end if it has none."""
    if BEGIN not in page:
        page = f"{page.rstrip()}\n\n## Speed\n\n{BEGIN}\n{END}\n"
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{generated}\n\n{END}{rest.partition(END)[2]}"


def draw(folder: Path, page: Path) -> None:
    """Draw the figures into the folder of the JSON files, and put the generated part into the page.

    Raises:
        RunError: there are no results.
    """
    generated = report(folder, page.parent)
    if not generated:
        raise RunError(f"no results in {folder}")
    text = page.read_text(encoding="utf-8") if page.exists() else "# Benchmarks\n"
    page.write_text(insert(text, generated), encoding="utf-8")
    print(f"wrote {page} and the figures in {folder}")
