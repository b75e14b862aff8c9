"""The declared study's figures: points against uncompressed over bits a value, at one rate, and at each best rate."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from common.drawing import COLOURS, plt
from study.matrix import chosen, difference
from study.methods import FINER, FINER_FIRST, FINER_LESS, ONE_LEVEL, shown
from study.parts import BASELINE, Part, Runs, Tuned
from study.tuned_tables import compared

ONE_RATE, BEST_RATES, AS_PEOPLE_TRAIN = "pareto_bits.png", "best_rates.png", "accuracy_over_bits.png"
BUDGET = 32 / 50  # bits a value
_TICKS = (-100, -30, -10, -3, -1, -0.5, 0, 0.5, 1, 2)


class Style(NamedTuple):
    """Of a method: its place in the legend, its colour's name, its marker, the word beside its points."""

    legend: str
    colour: str
    marker: str
    word: str = ""


class Point(NamedTuple):
    """Bits, points against uncompressed, and how far its bar goes down and up."""

    bits: float
    points: float
    down: float
    up: float


# Markers repeat the colours' distinction.
AT_ONE_RATE = {
    BASELINE: Style("uncompressed", "black", "s"),
    "fp16": Style("fp16", "black", "D"),
    **{one.name: Style("constant level", "blue", "o", shown(one.name)) for one in ONE_LEVEL},
    "1/4 error": Style("0.25, a level per tensor", "sky", "P"),
    "1/4, momentum kept": Style("0.25, momentum kept", "red", "X"),
    "ladder 4-8-16": Style("schedule 4-8-16", "orange", "^"),
    "ladder 4-1/4": Style("schedule 4-0.25", "orange", "d"),
    "ladder 1-2-4": Style("schedule 1-2-4", "orange", "v"),
    "ladder 1/8-1/4-1/2-1": Style("schedule 0.125 up to 1", "orange", ">"),
    "ladder 1-1/2-1/4-1/8": Style("schedule 1 down to 0.125", "orange", "<"),
    **{f"PowerSGD rank {rank}": Style("PowerSGD, by rank", "pink", "p", f"r{rank}") for rank in (1, 4)},
    "top-k 1/4": Style("top-k 0.25", "green", "*"),
}
AT_BEST_RATES = {
    **{name: Style("hvd_dyncomp", "blue", "o", shown(name)) for name in ("4", "1", "1/4", "1/8")},
    "1/4, c = 0.5": Style("0.25, step size x 0.5", "sky", "P"),
    "ladder 4-1/4": Style("schedule 4-0.25", "blue", "d"),
    "ladder 4-8-16": Style("schedule 4-8-16", "blue", "^"),
    **{f"PowerSGD rank {rank}": Style("PowerSGD", "pink", "p", f"r{rank}") for rank in (1, 2, 4)},
    **{
        f"PowerSGD rank {rank}, from 10 %": Style("PowerSGD, uncompressed at first", "wine", "h", f"r{rank}")
        for rank in (1, 2, 4)
    },
    "top-k 1/4": Style("top-k", "green", "*"),
    "DGC 1/4": Style("DGC", "green", "X"),
    "random-k 1/4": Style("random-k", "grey", "v"),
    "LoCo 4": Style("LoCo", "orange", "s"),
    "natural, 9 bits": Style("natural compression", "red", "D"),
    "1-bit Adam": Style("1-bit Adam", "yellow", "s"),
    "uncompressed, no momentum": Style("uncompressed, no momentum", "black", "s"),
    "fp16": Style("fp16", "black", "<"),
}
IN_THE_RECIPE = {
    **{one.name: Style("constant level", "blue", "o", f"{one.bits_at(1):g}") for one in (ONE_LEVEL[0], *FINER)},
    "4": Style("constant level", "blue", "o", "4"),
    **{
        one.name: Style("constant level, less momentum", "sky", "o", f"{one.bits_at(1):g}")
        for one in (*FINER_LESS, *ONE_LEVEL[-2:])
    },
    FINER_FIRST[2].name: Style("8 bits over 10 % of the steps, then 4", "orange", "^"),
    "fp16": Style("fp16", "black", "D"),
    **{f"PowerSGD rank {rank}": Style("PowerSGD, by rank", "pink", "p", f"r{rank}") for rank in (1, 4)},
    "PowerSGD rank 4, small at 8, no momentum": Style("PowerSGD, by rank", "pink", "p", "r4, no momentum"),
    "LoCo 4": Style("LoCo", "green", "s"),
}


def at_one_rate(folder: Path, part: Part, runs: Runs) -> None:
    """Draw a part's methods into an existing folder: a panel for each task that has something to compare."""
    found = {task: _of_part(part, runs, task, AT_ONE_RATE) for task in part.tasks}
    panels = {task: points for task, points in found.items() if points.keys() > {BASELINE}}
    below = {name: (0, -13) for name in ("4", "1", "0.25")}  # neighbours' words on different sides
    for axes, points in _drawn(folder / ONE_RATE, panels, AT_ONE_RATE, below):
        axes.axvline(BUDGET, color=COLOURS["grey"], lw=0.8, ls=":")
        level = [points[one.name] for one in ONE_LEVEL if one.name in points]
        look: dict[str, Any] = {"color": COLOURS["blue"], "lw": 0.8, "alpha": 0.5}
        axes.plot([one.bits for one in level], [one.points for one in level], **look)


def at_best_rates(folder: Path, parts: Iterable[Tuned], runs: Runs) -> None:
    """Draw the rows of parts likewise, each task a panel, with bars down to what they are above with 95 %."""
    found = {part.task: _of_tuned(part, runs) for part in parts}
    for _ in _drawn(folder / BEST_RATES, {task: points for task, points in found.items() if points}, AT_BEST_RATES):
        pass


def as_people_train(folder: Path, recipe: Part, tuned: Tuned, runs: Runs) -> None:
    """Draw a part's first task, and beside it a task in which each method has its best rate."""
    text = _of_part(recipe, runs, recipe.tasks[0], IN_THE_RECIPE)
    images = {row: point for row, point in _of_tuned(tuned, runs).items() if row in IN_THE_RECIPE}
    panels = {"text, AdamW, clipped, warm-up over 3 %": text, "ResNet-8, SGD, each at its best rate": images}
    below = {"r4, no momentum": (0, -15)}  # another word is above
    drawn = {title: points for title, points in panels.items() if points}
    for _ in _drawn(folder / AS_PEOPLE_TRAIN, drawn, IN_THE_RECIPE, below):
        pass


def _of_part(part: Part, runs: Runs, task: str, styles: Mapping[str, Style]) -> dict[str, Point]:
    found = {}
    for name in (name for name in styles if name in part.methods):
        if gained := difference(runs, part, task, name):
            bits = [run["all_bits"] for run in chosen(runs, part, task, name).values()]
            error = gained.error if gained.seeds > 1 else 0.0
            found[name] = Point(sum(bits) / len(bits), gained.mean, error, error)
    return found


def _of_tuned(part: Tuned, runs: Runs) -> dict[str, Point]:
    found = {row: compared(part, runs, row) for row in part.rows if row != BASELINE}
    return {
        row: Point(one.bits, one.mean, 0.0 if math.isnan(one.bound) else one.mean - one.bound, 0.0)
        for row, one in found.items()
        if one
    }


Panel = tuple[Axes, dict[str, Point]]


def _drawn(
    path: Path,
    panels: Mapping[str, dict[str, Point]],
    styles: Mapping[str, Style],
    places: Mapping[str, tuple[int, int]] | None = None,
) -> Iterable[Panel]:
    """Panels of one figure, each for the caller to add to; written when all have been asked for. None, no figure."""
    if not panels:
        return
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    size = (4.3 * columns, 3.4 * rows + 1.1)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.set_axis_off()
    for axes in grid[:, 0]:
        axes.set_ylabel("points against uncompressed")
    handles: dict[str, Any] = {}
    for axes, (task, points) in zip(grid.flat, panels.items(), strict=False):
        _panel(axes, points, styles, handles, places or {})
        axes.set(title=task, xlabel="bits per value, everything included")
        yield axes, points
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": max(1, int(size[0] / 2.3))}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **look)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _panel(
    axes: Axes,
    points: Mapping[str, Point],
    styles: Mapping[str, Style],
    handles: dict[str, Any],
    places: Mapping[str, tuple[int, int]],
) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.18)  # words stand there
    axes.set_yscale("symlog", linthresh=1, linscale=1.5)  # linear within a point
    axes.axhline(0, color=COLOURS["grey"], lw=0.8)
    look: dict[str, Any] = {"ms": 6, "mec": "white", "mew": 0.6, "elinewidth": 1}
    for name, (bits, gained, down, up) in points.items():
        style = styles[name]
        bar: Any = ([down], [up]) if down or up else None
        line, *_ = axes.errorbar(bits, gained, bar, fmt=style.marker, color=COLOURS[style.colour], **look)
        handles.setdefault(style.legend, line)
        axes.annotate(style.word, (bits, gained), **_beside(style.word, places))
    bottom = max(-100.0, min(-1.2, 2 * min(one.points - one.down for one in points.values())))
    axes.set_ylim(bottom, 2.5)
    axes.set_yticks([tick for tick in _TICKS if tick >= bottom])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)


def _beside(word: str, places: Mapping[str, tuple[int, int]]) -> dict[str, Any]:
    """Where a word stands: above its point, or left of it, where the next point is close."""
    place: dict[str, Any] = {"xytext": places.get(word, (0, 6)), "ha": "center"}
    if word == "0.125":
        place = {"xytext": (-6, 0), "ha": "right", "va": "center"}
    return {**place, "textcoords": "offset points", "fontsize": 8}
