"""The declared study's figure of accuracy against bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # files only: no display is there, or needed

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from screening.contenders import ONE_LEVEL, shown
from studies.matrix import chosen, difference
from studies.parts import BASELINE, Part, Runs
from studies.tuned_plot import beside

FIGURE = "pareto_bits.png"
BUDGET = 32 / 50  # bits a value


class Style(NamedTuple):
    """Of a contender: its colour, marker, the word beside its points, and its place in the legend."""

    colour: str
    marker: str
    label: str
    legend: str


# Okabe and Ito's colours, which colour-blind readers tell apart; markers repeat the distinction.
_STYLES = {
    BASELINE: Style("#000000", "s", "", "uncompressed"),
    "fp16": Style("#000000", "D", "", "fp16"),
    **{one.name: Style("#0072B2", "o", shown(one.name), "constant level") for one in ONE_LEVEL},
    "1/4 error": Style("#56B4E9", "P", "", "0.25, a level per tensor"),
    "1/4, momentum kept": Style("#D55E00", "X", "", "0.25, momentum kept"),
    "ladder 4-8-16": Style("#E69F00", "^", "", "schedule 4-8-16"),
    "ladder 4-1/4": Style("#E69F00", "d", "", "schedule 4-0.25"),
    "ladder 1-2-4": Style("#E69F00", "v", "", "schedule 1-2-4"),
    "ladder 1/8-1/4-1/2-1": Style("#E69F00", ">", "", "schedule 0.125 up to 1"),
    "ladder 1-1/2-1/4-1/8": Style("#E69F00", "<", "", "schedule 1 down to 0.125"),
    **{f"PowerSGD rank {rank}": Style("#CC79A7", "p", f"r{rank}", "PowerSGD, by rank") for rank in (1, 4)},
    "top-k 1/4": Style("#009E73", "*", "", "top-k 0.25"),
}


def write(figures: Path, part: Part, runs: Runs) -> None:
    """Draw it into an existing folder: all contenders that have a style, in one panel for each of the part's tasks that
    has something to compare.
    """
    panels = {task: _points(part, runs, task) for task in part.tasks}
    panels = {task: points for task, points in panels.items() if points.keys() > {BASELINE}}
    columns = min(2, len(panels)) or 1
    rows = -(-len(panels) // columns) or 1
    size = (4.3 * columns, 3.3 * rows + 1.1)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Artist] = {}
    for axes, (task, points) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, points, handles)
        axes.set(title=task, xlabel="bits per value, everything included")
        axes.axvline(BUDGET, color="#999999", lw=0.8, ls=":")
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("points against uncompressed")
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": max(1, int(size[0] / 2.3))}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **look)
    figure.savefig(figures / FIGURE, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _points(part: Part, runs: Runs, task: str) -> dict[str, tuple[float, float, float]]:
    """By contender: bits, points of accuracy against uncompressed and their error."""
    found = {}
    for contender in _STYLES:
        gained = difference(runs, part, task, contender)
        if gained:
            bits = [run["all_bits"] for run in chosen(runs, part, task, contender).values()]
            found[contender] = (sum(bits) / len(bits), gained.mean, gained.error if gained.seeds > 1 else 0.0)
    return found


def _panel(axes: Axes, points: dict[str, tuple[float, float, float]], handles: dict[str, Artist]) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.18)  # words stand there
    axes.set_yscale("symlog", linthresh=1, linscale=1.5)  # linear within a point
    axes.axhline(0, color="#999999", lw=0.8)
    for contender, (x, y, error) in points.items():
        style = _STYLES[contender]
        look: dict[str, Any] = {
            "fmt": style.marker,
            "color": style.colour,
            "ms": 6,
            "mec": "white",
            "mew": 0.6,
            "elinewidth": 1,
        }
        line, *_ = axes.errorbar(x, y, error or None, **look)
        handles.setdefault(style.legend, line)
        if style.label:
            place = beside(style.label)
            if style.label in ("4", "1", "0.25"):  # neighbours' words on different sides
                place["xytext"] = (0, -13)
            axes.annotate(style.label, (x, y), **place)
    level = [points[one.name] for one in ONE_LEVEL if one.name in points]
    axes.plot([x for x, *_ in level], [y for _, y, _ in level], color=_STYLES["1"].colour, lw=0.8, alpha=0.5)
    lowest = min((y - error for _, y, error in points.values()), default=-1)
    axes.set_ylim(min(-1.2, 2 * lowest), 2)
    axes.set_yticks([tick for tick in (-30, -10, -3, -1, -0.5, 0, 0.5, 1) if tick >= min(-1.2, 2 * lowest)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
