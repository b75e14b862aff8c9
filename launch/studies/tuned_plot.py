"""The figure of methods at their best rates: points against uncompressed, with their bounds, over bits a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # files only: no display is there, or needed

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from screening.contenders import shown
from studies.parts import BASELINE, Runs, Tuned
from studies.tuned_tables import Compared, compared

FIGURE = "best_rates.png"


class Style(NamedTuple):
    """Of a family of contenders: whose points have one colour and one marker, and words beside them."""

    legend: str
    colour: str
    marker: str


# Okabe and Ito's colours, which colour-blind readers tell apart; markers repeat the distinction.
_OURS = Style("hvd_dyncomp", "#0072B2", "o")
_POWERSGD = Style("PowerSGD", "#CC79A7", "p")
_LATE = Style("PowerSGD, uncompressed at first", "#882255", "h")
_STYLES = {
    **dict.fromkeys(("4", "1", "1/4", "1/8"), _OURS),
    "1/4, c = 0.5": Style("0.25, step size x 0.5", "#56B4E9", "P"),
    "ladder 4-1/4": Style("schedule 4-0.25", "#0072B2", "d"),
    "ladder 4-8-16": Style("schedule 4-8-16", "#0072B2", "^"),
    **{f"PowerSGD rank {rank}": _POWERSGD for rank in (1, 2, 4)},
    **{f"PowerSGD rank {rank}, from 10 %": _LATE for rank in (1, 2, 4)},
    "top-k 1/4": Style("top-k", "#009E73", "*"),
    "DGC 1/4": Style("DGC", "#009E73", "X"),
    "random-k 1/4": Style("random-k", "#999999", "v"),
    "LoCo 4": Style("LoCo", "#E69F00", "s"),
    "natural, 9 bits": Style("natural compression", "#D55E00", "D"),
    "1-bit Adam": Style("1-bit Adam", "#F0E442", "s"),
    "uncompressed, no momentum": Style("uncompressed, no momentum", "#000000", "s"),
    "fp16": Style("fp16", "#000000", "<"),
}


def label(row: str) -> str:
    """What stands beside a point: a level, or a rank."""
    if _STYLES[row] in (_POWERSGD, _LATE):
        return "r" + row.split(",")[0].split()[-1]
    return shown(row) if _STYLES[row] is _OURS else ""


def beside(word: str) -> dict[str, Any]:
    """Where a word stands: above its point, or left of it, where the next point is close."""
    place: dict[str, Any] = {"xytext": (0, 6), "ha": "center"}
    if word == "0.125":
        place = {"xytext": (-6, 0), "ha": "right", "va": "center"}
    return {**place, "textcoords": "offset points", "fontsize": 8}


def write(figures: Path, parts: Iterable[Tuned], runs: Runs) -> None:
    """Draw it into an existing folder: a panel for each task that has something to compare; none, no figure."""
    panels = {part.task: _points(part, runs) for part in parts}
    panels = {task: points for task, points in panels.items() if points}
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (max(7.0, 4.3 * columns), 3.4 * rows + 1.1)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Artist] = {}
    for axes, (task, points) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, points, handles)
        axes.set(title=task, xlabel="bits per value, everything included")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("points against uncompressed")
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": int(size[0] / 2.3)}  # a word is two inches wide
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **look)
    figure.savefig(figures / FIGURE, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _points(part: Tuned, runs: Runs) -> dict[str, Compared]:
    found = {row: compared(part, runs, row) for row in part.rows if row != BASELINE}
    return {row: one for row, one in found.items() if one}


def _panel(axes: Axes, points: dict[str, Compared], handles: dict[str, Artist]) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.18)  # words stand there
    axes.set_yscale("symlog", linthresh=1, linscale=1.5)  # linear within a point
    axes.axhline(0, color="#999999", lw=0.8)
    for row, one in points.items():
        style = _STYLES[row]
        below: Any = 0.0 if math.isnan(one.bound) else one.mean - one.bound
        look: dict[str, Any] = {
            "fmt": style.marker,
            "color": style.colour,
            "ms": 6,
            "mec": "white",
            "mew": 0.6,
            "elinewidth": 1,
        }
        line, *_ = axes.errorbar(one.bits, one.mean, ([below], [0.0]), **look)
        handles.setdefault(style.legend, line)
        if label(row):
            axes.annotate(label(row), (one.bits, one.mean), **beside(label(row)))
    lowest = min(one.mean if math.isnan(one.bound) else one.bound for one in points.values())
    bottom = max(-100.0, min(-1.2, 2 * lowest))
    axes.set_ylim(bottom, 3)
    axes.set_yticks([tick for tick in (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 2) if tick >= bottom])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
