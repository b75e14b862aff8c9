"""The benchmarks' figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from bench import memory, time_to_accuracy
from bench.results import SHARED_MEMORY, Summary
from bench.tables import bits_of, methods_of, rate_title, summaries, title
from common.drawing import COLOURS, plt
from netlab.shaping import bits_per_second

# Ours are solid, torch's dotted, Horovod's dashed.
_STYLES = {
    "alone": (COLOURS["grey"], "-"),
    **{"none": (COLOURS["black"], "--"), "fp16": (COLOURS["orange"], "--")},
    **{"0.125bit": (COLOURS["pink"], "-"), "0.25bit": (COLOURS["red"], "-"), "0.5bit": (COLOURS["yellow"], "-")},
    **{"1bit": (COLOURS["sky"], "-"), "2bit": (COLOURS["blue"], "-"), "4bit": (COLOURS["green"], "-")},
    **{"8bit": ("#006046", "-"), "16bit": ("#7A9E00", "-"), "32bit": ("#B0B0B0", "-")},
    **{"ddp": ("#8C564B", ":"), "ddp-fp16": ("#E377C2", ":"), "ddp-bf16": ("#BCBD22", ":")},
    **{"powersgd1": (COLOURS["wine"], ":"), "powersgd4": ("#AA4499", ":"), "dynamic": (COLOURS["blue"], "-")},
}
_OTHER = ("#444444", "-.")
_UNSHAPED = 10.5  # place on the axis of powers of ten: a bit over 10 Gbit/s
_MEMORY = 11.0
_MILLISECONDS = (100, 200, 500, 1000, 2000, 5000)


def place(rate: str) -> float:
    """Where a rate is drawn: the power of ten of its bits per second; links without a rate to the right of them."""
    if rate == SHARED_MEMORY:
        return _MEMORY
    bits = bits_per_second(rate)
    return _UNSHAPED if bits is None else math.log10(bits)


def step_times(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Time per step against link rate, one field per model, quartiles as bars."""
    figure, fields = plt.subplots(
        1, len(results), figsize=(max(8, 4 * len(results)), 5), layout="constrained", squeeze=False
    )
    for axes, result in zip(fields[0], results, strict=True):
        rates = summaries(result)
        for name in methods_of(rates):
            points = [(place(rate), found[name]) for rate, found in rates.items() if name in found]
            _line(axes, name, points)
        axes.set(yscale="log", title=f"{result['model']}, {result['values'] / 1e6:.1f} M values", ylabel="ms per step")
        _plain_ticks(axes)
        _rate_axis(axes, list(rates))
    _finish(figure, fields[0][0], path)


# Of the figures of one model's steps: what is compared, and how it is called there.
_WITH_HOROVOD = {
    "none": "Horovod",
    "fp16": "Horovod fp16",
    "powersgd1": "PowerSGD, rank 1",
    "4bit": "4 bits",
    "0.25bit": "0.25 bit",
}
_WITH_DDP = {
    "ddp": "DDP",
    "ddp-fp16": "DDP, fp16 hook",
    "powersgd1": "PowerSGD, rank 1",
    "4bit-ddp": "4 bits",
    "0.25bit-ddp": "0.25 bit",
}
_BRIGHTER = {"none": "#4c8dff", "ddp": "#4c8dff", "powersgd1": "#b060cc", "ddp-fp16": COLOURS["orange"]}
_ON_ANY_GROUND = "#7d8590"  # readable on white and on a dark page


def by_link(result: Mapping[str, Any], path: Path) -> None:
    """Time per step against link rate: few methods, each named at its line; for light and dark pages."""
    figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
    rates = {rate: found for rate, found in summaries(result).items() if rate != SHARED_MEMORY}
    places = [place(rate) for rate in rates]
    with_horovod = all("none" in found for found in rates.values())
    for name, label in (_WITH_HOROVOD if with_horovod else _WITH_DDP).items():
        colour, line = _STYLES.get(name) or _STYLES[name.removesuffix("-ddp")]
        colour = _BRIGHTER.get(name, colour)
        steps = [found[name].median for found in rates.values()]
        ours = name.removesuffix("-ddp").endswith("bit")
        axes.plot(places, steps, line, color=colour, marker="o", lw=3 if ours else 1.8)
        shift = {"powersgd1": 5, "0.25bit": -5, "0.25bit-ddp": -5}.get(name, 0)  # they end close to one another
        text = f"{label}: {steps[0] / 1000:.1f} s" if steps[0] >= 1000 else f"{label}: {steps[0]:.0f} ms"
        axes.annotate(
            text,
            (places[0], steps[0]),
            xytext=(-10, shift),
            textcoords="offset points",
            ha="right",
            va="center",
            color=colour,
            fontsize=12,
            fontweight="bold" if ours else "normal",
        )
    axes.set(yscale="log", xlim=(places[0] - 1.15, places[-1] + 0.15), ylim=(100, 5000))
    axes.set_xticks(places, [rate_title(rate) for rate in rates])
    axes.set_yticks(_MILLISECONDS, [f"{one} ms" if one < 1000 else f"{one // 1000} s" for one in _MILLISECONDS])
    axes.minorticks_off()
    axes.yaxis.tick_right()
    axes.set_title(
        f"Time of a training step, ResNet-18, {'Horovod' if with_horovod else 'DDP'}, two workers",
        color=_ON_ANY_GROUND,
        fontsize=13,
    )
    axes.tick_params(colors=_ON_ANY_GROUND, labelsize=12)
    axes.grid(axis="y", alpha=0.3)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=130, transparent=True)
    plt.close(figure)


def _line(axes: Axes, name: str, points: list[tuple[float, Summary]]) -> None:
    colour, line = _STYLES.get(name.removesuffix("-ddp"), _OTHER)
    middle = [summary.median for _, summary in points]
    spread = [[s.median - s.low for _, s in points], [s.high - s.median for _, s in points]]
    axes.errorbar(
        [x for x, _ in points], middle, spread, fmt=line, color=colour, label=title(name), marker=".", capsize=2
    )


def _plain_ticks(axes: Axes) -> None:
    """Milliseconds as numbers: 1, 2 and 5 of each power of ten, or more of them where that would be few."""
    low, high = axes.get_ylim()
    parts: tuple[float, ...] = (1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8)
    shown = [part * 10**power for power in range(-1, 5) for part in parts if low <= part * 10**power <= high]
    axes.set_yticks(shown, [f"{ms:g}" for ms in shown])
    axes.yaxis.set_minor_formatter(NullFormatter())


def _rate_axis(axes: Axes, rates: list[str]) -> None:
    axes.set_xticks([place(rate) for rate in rates], [rate_title(rate).replace(" ", "\n") for rate in rates])
    axes.set_xlabel("link")
    axes.grid(alpha=0.3, which="both")


def speed_ups(result: Mapping[str, Any], path: Path) -> None:
    """How many times shorter a step is than with Horovod uncompressed, against bits per value; one curve per rate."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    colours = plt.get_cmap("viridis")
    rates = {rate: found for rate, found in summaries(result).items() if "none" in found}
    for number, (rate, found) in enumerate(rates.items()):
        colour = colours(0.8 * number / max(len(rates) - 1, 1))
        ours = sorted((bits, s) for name, s in found.items() if (bits := bits_of(name)) is not None)
        gains = [found["none"].median / summary.median for _, summary in ours]
        axes.plot([bits for bits, _ in ours], gains, marker=".", color=colour, label=rate_title(rate))
        if "fp16" in found:
            axes.plot(16, found["none"].median / found["fp16"].median, marker="x", ls="", color=colour)
    axes.axhline(1, color="#000000", lw=0.8)
    axes.set(
        xscale="log", yscale="log", xlabel="bits per value (crosses: Horovod fp16)", ylabel="times faster than Horovod"
    )
    ticks = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
    axes.set_xticks(ticks, [f"{bits:g}" for bits in ticks])
    axes.minorticks_off()
    gains_shown = (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)
    axes.set_yticks(gains_shown, [f"{gain:g}" for gain in gains_shown])
    axes.grid(alpha=0.3)
    _finish(figure, axes, path)


def accuracies(results: Mapping[str, Any], path: Path) -> None:
    """Test accuracy against seconds of training."""
    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for name, run in results["runs"].items():
        colour, line = _STYLES.get(name, _OTHER)
        seconds, found = time_to_accuracy.curve(run)
        label = time_to_accuracy.TITLES[name]
        axes.plot(seconds, [100 * accuracy for accuracy in found], line, color=colour, marker=".", label=label)
    axes.axhline(100 * time_to_accuracy.target(results), color="#999999", lw=0.8, label="goal")
    axes.set(xlabel=f"seconds of training steps, {rate_title(results['rate'])}", ylabel="test accuracy, %")
    axes.grid(alpha=0.3)
    _finish(figure, axes, path)


def memories(results: Mapping[str, Any], path: Path) -> None:
    """Bytes a value on top of parameters and gradients, of the worker that takes most: residuals, and the rest."""
    layouts = results["layouts"].values()
    figure, fields = plt.subplots(1, len(layouts), figsize=(9, 3), layout="constrained", sharey=True, squeeze=False)
    for axes, layout in zip(fields[0], layouts, strict=True):
        names = list(layout["contenders"])
        most = [max(rank["host"] for rank in ranks) / results["values"] for ranks in layout["contenders"].values()]
        each = memory.residual_bytes(layout["hosts"], layout["workers_per_host"])
        residuals = [each if bits_of(name) is not None else 0 for name in names]
        rest = [one - residual for one, residual in zip(most, residuals, strict=True)]
        axes.barh([title(name) for name in names], residuals, color=COLOURS["orange"], label="residuals, calculated")
        label = "the rest: messages and buffers"
        axes.barh([title(name) for name in names], rest, left=residuals, color=COLOURS["blue"], label=label)
        axes.set(title=memory.title_of(layout), xlabel="bytes per value")
        axes.grid(axis="x", alpha=0.3)
    fields[0][0].invert_yaxis()
    _finish(figure, fields[0][0], path)


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    handles, labels = axes.get_legend_handles_labels()
    columns = int(figure.get_figwidth() / (0.7 + 0.085 * max(map(len, labels))))  # inches
    figure.legend(handles, labels, loc="outside lower center", ncols=max(1, columns), frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
