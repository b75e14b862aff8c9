"""The declared study's figures: accuracy against bits, and against the time of a step over a slow link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")  # files only: no display is there, or needed

from matplotlib import pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from costs.model import PAYLOAD
from screening.contenders import ONE_LEVEL
from screening.tasks import TASKS
from studies.matrix import chosen, difference
from studies.parts import BASELINE, Part, Runs

FIGURES = ("pareto_bits.png", "pareto_time.png")

RATE = 100e6  # bits a second
BUDGET = 32 / 50  # bits a value

Cost = Callable[[dict, float], float]  # of a run, and what a worker computes in a step, seconds


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
    **{one.name: Style("#0072B2", "o", one.name, "one level for all") for one in ONE_LEVEL},
    "1/4 error": Style("#56B4E9", "P", "", "1/4, a level for each tensor"),
    "1/4, momentum kept": Style("#D55E00", "X", "", "1/4, momentum kept"),
    "ladder 4-8-16": Style("#E69F00", "^", "", "ladder 4-8-16"),
    "ladder 4-1/4": Style("#E69F00", "d", "", "ladder 4, late 1/4"),
    "ladder 1-2-4": Style("#E69F00", "v", "", "ladder 1-2-4"),
    "ladder 1/8-1/4-1/2-1": Style("#E69F00", ">", "", "ladder 1/8 up to 1"),
    "ladder 1-1/2-1/4-1/8": Style("#E69F00", "<", "", "ladder 1 down to 1/8"),
    **{f"PowerSGD rank {rank}": Style("#CC79A7", "p", f"r{rank}", "PowerSGD, by rank") for rank in (1, 4)},
    "top-k 1/4": Style("#009E73", "*", "", "top-k 1/4"),
}


def seconds_of_a_step(run: dict, computed: float) -> float:
    """What a worker computes, and then its bytes over a link of `RATE`; nothing overlaps, and to compress is free."""
    return computed + run["values"] * run["all_bits"] / (RATE * PAYLOAD)


def write(output_dir: Path, part: Part, runs: Runs) -> None:
    """Draw both figures into an existing folder: all contenders that have a style, in one panel for each of the part's
    tasks that has something to compare.
    """
    shown = [
        task for task in part.tasks if _points(part, runs, task, lambda run, _: run["all_bits"]).keys() > {BASELINE}
    ]
    bits = "bits a value, everything included"
    _figure(output_dir / FIGURES[0], part, runs, shown, lambda run, _: run["all_bits"], bits, BUDGET)
    milliseconds = f"ms a step, {RATE / 1e6:.0f} Mbit/s"
    _figure(output_dir / FIGURES[1], part, runs, shown, lambda *a: 1e3 * seconds_of_a_step(*a), milliseconds, None)


def computed(part: Part, runs: Runs, task: str) -> float:
    """Seconds a step and worker of the fastest uncompressed run, batches and evaluation included."""
    found = chosen(runs, part, task, BASELINE).values()
    return min((run["seconds"] / run["steps"] / TASKS[task].workers for run in found), default=0.0)


def _points(part: Part, runs: Runs, task: str, cost: Cost) -> dict[str, tuple[float, float, float]]:
    """By contender: cost, points of accuracy against uncompressed and their error."""
    found = {}
    time = computed(part, runs, task)
    for contender in _STYLES:
        gained = difference(runs, part, task, contender)
        if gained:
            costs = [cost(run, time) for run in chosen(runs, part, task, contender).values()]
            found[contender] = (sum(costs) / len(costs), gained.mean, gained.error if gained.seeds > 1 else 0.0)
    return found


def _figure(path: Path, part: Part, runs: Runs, tasks: list[str], cost: Cost, label: str, budget: float | None) -> None:
    columns = min(3, len(tasks)) or 1
    rows = -(-len(tasks) // columns) or 1
    figure, grid = plt.subplots(
        rows, columns, figsize=(4.3 * columns, 3.3 * rows + 0.9), layout="constrained", squeeze=False
    )
    handles: dict[str, Artist] = {}
    for axes, task in zip(grid.flat, tasks, strict=False):
        _panel(axes, _points(part, runs, task, cost), handles)
        axes.set(title=task, xlabel=label)
        if budget:
            axes.axvline(budget, color="#999999", lw=0.8, ls=":")
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("points against uncompressed")
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(axes: Axes, points: dict[str, tuple[float, float, float]], handles: dict[str, Artist]) -> None:
    axes.set_xscale("log")
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
            below = style.label in ("4", "1", "1/4")  # neighbours' words on different sides
            place: dict[str, Any] = {"xytext": (0, -13 if below else 6), "textcoords": "offset points", "ha": "center"}
            axes.annotate(style.label, (x, y), fontsize=8, **place)
    level = [points[one.name] for one in ONE_LEVEL if one.name in points]
    axes.plot([x for x, *_ in level], [y for _, y, _ in level], color=_STYLES["1"].colour, lw=0.8, alpha=0.5)
    lowest = min((y - error for _, y, error in points.values()), default=-1)
    axes.set_ylim(min(-1.2, 2 * lowest), 2)
    axes.set_yticks([tick for tick in (-30, -10, -3, -1, -0.5, 0, 0.5, 1) if tick >= min(-1.2, 2 * lowest)])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
