"""The benchmarks' figures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench import memory
from bench.tables import bits_of, methods_of, rate_title, summaries, title
from common.drawing import COLOURS, plt

_OURS, _OTHERS = COLOURS["green"], "#9aa0a6"
_SHOWN = ("none", "ddp", "fp16", "ddp-fp16", "powersgd1", "4bit", "1bit", "0.25bit")


def steps_by_link(result: Mapping[str, Any], path: Path) -> None:
    """Milliseconds of a step, a field per link and a bar per method; a line shows those of a step without exchange."""
    rates = summaries(result)
    names = [name for name in methods_of(rates) if name.removesuffix("-ddp") in _SHOWN]
    colours = [_OURS if name.removesuffix("-ddp").endswith("bit") else _OTHERS for name in names]
    figure, fields = plt.subplots(
        1, len(rates), figsize=(2.4 + 2.1 * len(rates), 0.9 + 0.32 * len(names)), layout="constrained", sharey=True
    )
    for axes, (rate, found) in zip(np.atleast_1d(fields), rates.items(), strict=True):
        steps = [found[name].median for name in names]
        bars = axes.barh([title(name) for name in names], steps, color=colours)
        axes.bar_label(bars, fmt="%.0f", padding=3, fontsize=9)
        axes.axvline(found["alone"].median, color=COLOURS["black"], lw=1, ls="--")
        axes.set(title=rate_title(rate), xlim=(0, 1.25 * max(steps)))
        axes.set_xticks([])
        axes.spines[["top", "right", "bottom"]].set_visible(False)
    np.atleast_1d(fields)[0].invert_yaxis()
    figure.supxlabel("ms per step; dashed: without any exchange", fontsize=9)
    figure.savefig(path, dpi=130)
    plt.close(figure)


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
