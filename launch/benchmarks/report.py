"""Draws the benchmarks' figures and writes their tables, from whatever JSON files are there.

docs/tables/benchmarks.md and growth.md are written whole; docs/benchmarks.md and docs/benchmarks.md have some tables
between marks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import gpu_kernels, growth, growth_page, kernels, memory, plots, ratios, tables, time_to_accuracy
from benchmarks.gpus import on_gpus
from benchmarks.results import Summary, load
from benchmarks.tables import rate_title, summaries, title
from common.errors import RunError
from common.markdown import filled, markdown
from lab.shaping import bits_per_second

TABLES, GROWTH, GOALS = "tables.md", "growth.md", "goals.md"
_HEADS = {
    TABLES: "# Benchmarks: all tables\n\n`make bench` writes this page. [Benchmarks](../benchmarks.md) has the "
    "summary, the machines and the settings.",
    GROWTH: "# Benchmarks: a model of more workers\n\n`python launch/bench.py --part growth` writes this page. "
    "[Benchmarks](../benchmarks.md#growth) has the summary.",
}
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


def exchange_section(results: Mapping[str, Any], folder: Path) -> list[str]:
    name = f"exchange-{results['model']}-{results['workers']}"
    parts = [
        f"## The exchange alone: {results['model']}, {tables.layout_title(results)}{_gloo(results['rates'].values())}"
    ]
    bits = tables.bits(results)
    hosts, per_host = tables.hosts_of(results)
    if per_host > 1:
        parts += [tables.times(results), tables.gains(results)]
    elif hosts == 2:
        plots.step_times([results], folder / f"{name}-time.png")
        plots.speed_ups(results, folder / f"{name}-speedup.png")
        parts += [tables.times(results), break_even_table(results)]
        parts.append(f"![Time per step against link rate]({name}-time.png)")
        parts.append(f"![Speed-up against bits per value]({name}-speedup.png)")
    return [*parts, bits, tables.caption(results), links(results)]


def training_section(files: list[dict[str, Any]], folder: Path) -> list[str]:
    plots.step_times(files, folder / "training-time.png")
    for results in files:
        if results["model"] == "resnet18":
            plots.by_link(results, folder / "steps-resnet18.png")
    parts = ["## Training steps", "![Time per training step](training-time.png)"]
    for results in files:
        parts += [tables.times(results), tables.caption(results)]
    return parts


def sharded_section(results: Mapping[str, Any]) -> list[str]:
    parts = [f"## Shards within hosts: {results['model']}, {tables.layout_title(results)}", tables.times(results)]
    return [*parts, tables.bits(results), tables.caption(results), links(results)]


def accuracy_section(results: Mapping[str, Any], folder: Path) -> list[str]:
    figure = folder / time_to_accuracy.figure_name(results)
    plots.accuracies(results, figure)
    return [
        f"## Time to accuracy: {time_to_accuracy.title(results)}",
        time_to_accuracy.table(results),
        time_to_accuracy.caption(results),
        f"![Test accuracy against time]({figure.name})",
    ]


def gpu_sections(
    arithmetic: Mapping[str, Any], exchanges: _Files, training: _Files, accuracies: _Files, memories: _Files
) -> list[str]:
    """What was measured on GPUs, in tables."""
    parts = []
    if arithmetic:
        parts += ["## On GPUs, arithmetic", gpu_kernels.report(arithmetic)]
    for results in sorted(exchanges, key=_by_hosts):
        where = tables.layout_title(results)
        parts += [f"## On GPUs, the exchange alone: {results['model']}, {where}{_gloo(results['rates'].values())}"]
        parts += [tables.times(results), tables.gains(results), tables.bits(results)]
        parts += [tables.caption(results), links(results)]
    if training:
        parts += ["## On GPUs, training steps"]
    for results in training:
        parts += [tables.times(results), tables.caption(results)]
    for results in accuracies:
        parts += [f"## On GPUs, time to accuracy: {time_to_accuracy.title(results)}"]
        parts += [time_to_accuracy.table(results), time_to_accuracy.caption(results)]
    for results in memories:
        parts += [f"## On GPUs, memory{_gloo([results])}", memory.report(results)]
    return parts


def _by_hosts(results: Mapping[str, Any]) -> tuple[int, int]:
    return tables.hosts_of(results)[1], results["workers"]


def growth_section(results: Mapping[str, Any], folder: Path) -> list[str]:
    plots.deviations(results, folder / "growth-fit.png")
    plots.predictions(results, folder / "growth.png")
    return [
        "## Growth: a model of what was measured",
        *growth_page.measured(results),
        "![Predicted against measured times](growth-fit.png)",
        "## Growth: predicted, not measured",
        "![Predicted time per step against hosts](growth.png)",
        *growth_page.predicted(results),
    ]


def report(folder: Path) -> str:
    """All tables but those of growth, and their figures, beside the JSON files in `folder`."""
    parts: list[str] = []
    if (folder / kernels.FILE).exists():
        parts += [
            "## Arithmetic",
            "`python launch/bench.py --part kernels`: " + kernels.report(load(folder / kernels.FILE)),
        ]
    found = {kind: [load(path) for path in sorted(folder.glob(f"{kind}*.json"))] for kind in _KINDS}
    exchanges, training, accuracies, memories = ([one for one in found[kind] if not on_gpus(one)] for kind in _KINDS)
    for results in sorted(exchanges, key=_by_hosts):
        parts += exchange_section(results, folder)
    if one_worker := [one for one in training if tables.hosts_of(one)[1] == 1]:
        parts += training_section(one_worker, folder)
    for results in training:
        if tables.hosts_of(results)[1] > 1:
            parts += sharded_section(results)
    for results in accuracies:
        parts += accuracy_section(results, folder)
    for results in memories:
        parts += [f"## Memory{_gloo([results])}", memory.report(results)]
    arithmetic = load(folder / kernels.GPU_FILE)
    parts += gpu_sections(arithmetic, *([one for one in found[kind] if on_gpus(one)] for kind in _KINDS))
    return "\n\n".join(part for part in parts if part)


def shown(folder: Path) -> dict[str, str]:
    """The tables of docs/benchmarks.md and goals.md by name, of what was measured on CPUs over MPI."""
    found = {kind: [load(path) for path in sorted(folder.glob(f"{kind}*.json"))] for kind in _KINDS}
    exchanges, training, accuracies, memories = (
        [one for one in found[kind] if not on_gpus(one) and not _gloo(one.get("rates", {"": one}).values())]
        for kind in _KINDS
    )
    sharded = [one for one in training if tables.hosts_of(one)[1] > 1]
    training = sorted((one for one in training if one not in sharded), key=lambda one: -one["values"])
    exchanges.sort(key=_by_hosts)
    two = [one for one in exchanges if tables.hosts_of(one) == (2, 1)]
    several = [one for one in exchanges if tables.hosts_of(one)[1] > 1]
    named = {f"{one['model']}, training": ratios.by_level(one) for one in training}
    named |= {f"{one['model']}, exchange": ratios.by_level(one) for one in two}
    named |= {f"{one['model']}, frameworks": ratios.by_framework(one) for one in two}
    named |= {f"{one['model']}, goals": ratios.by_goal(one) for one in (*two, *sharded)}
    named |= {f"{one['model']}, shards": ratios.by_sharding(one) for one in sharded}
    for one in accuracies:
        table = f"{time_to_accuracy.table(one)}\n\n{time_to_accuracy.caption(one)}"
        named[f"{time_to_accuracy.title(one)}, accuracy"] = table
    named |= {"models": ratios.by_model(training), "hosts": ratios.by_layout(several)}
    return {**named, "memory": "\n\n".join(map(memory.report, memories))}


def draw(folder: Path, page: Path) -> None:
    """Draw the figures into the folder of the JSON files, write all tables there, and those of the page into the page.

    Raises:
        RunError: there are no results.
    """
    written = {TABLES: report(folder)}
    if (folder / growth.FILE).exists():
        written[GROWTH] = "\n\n".join(growth_section(load(folder / growth.FILE), folder))
    if not any(written.values()):
        raise RunError(f"no results in {folder}")
    for name, text in written.items():
        (folder / name).write_text(f"{_HEADS[name]}\n\n{text}\n", encoding="utf-8")
    for one in (page, folder / GOALS):
        if one.exists():
            one.write_text(filled(one.read_text(encoding="utf-8"), shown(folder), "make bench"), encoding="utf-8")
    print(f"wrote {page}, and tables and figures in {folder}")
