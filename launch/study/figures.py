"""The declared study's figures: test loss against uncompressed over bits a value, in the recipe, and at best rates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from common.drawing import COLOURS, plt
from study.compared import Compared, chosen, of_part, of_tuned
from study.methods import FP16, LESS, MORE_FIRST, NESTEROV, POWERSGD, RIVALS, WHOLE, Method, level, shown
from study.parts import BASELINE, Part, Runs, Tuned

BEST_RATES, AS_PEOPLE_TRAIN = "best_rates.png", "accuracy_over_bits.png"
STAMP = "wire version 13"  # of the runs in the record


# Where words stand: above a point and its bar, or beside it where the points of others are above.
ABOVE: dict[str, Any] = {"xytext": (0, 5), "ha": "center", "va": "bottom"}
LEFT: dict[str, Any] = {"xytext": (-6, 0), "ha": "right", "va": "center"}
RIGHT: dict[str, Any] = {"xytext": (6, 0), "ha": "left", "va": "center"}


class Style(NamedTuple):
    """Of a method: its place in the legend, its colour's name, its marker, the word at its point, and where."""

    legend: str
    colour: str
    marker: str
    word: str = ""
    at: dict[str, Any] = ABOVE


def _levels(some: Iterable[Method], legend: str, colour: str, marker: str, at: dict[str, Any]) -> dict[str, Style]:
    return {one.name: Style(legend, colour, marker, shown(level(one.bits_at(1))), at) for one in some}


LESS_MOMENTUM, UNCOMPRESSED = "less momentum", "uncompressed, with the momentum of its colour"
WHOLE_MOMENTUM, NESTEROVS = "the optimizer's momentum", "Nesterov's momentum (NAdam)"
IN_THE_RECIPE = {
    BASELINE: Style(WHOLE_MOMENTUM, "blue", "s"),
    **_levels(WHOLE[:5], WHOLE_MOMENTUM, "blue", "o", ABOVE),
    MORE_FIRST[2].name: Style("8 bits over 10 % of the steps, then 4", "orange", "^"),
    **_levels(LESS[:3], LESS_MOMENTUM, "sky", "v", LEFT),
    NESTEROV[0].name: Style(NESTEROVS, "green", "s"),
    **_levels(NESTEROV[1:], NESTEROVS, "green", "d", RIGHT),
    FP16.name: Style("fp16", "black", "P"),
    POWERSGD.name: Style("PowerSGD, rank 4", "pink", "p"),
    RIVALS["PowerSGD rank 4"][1].name: Style("PowerSGD, rank 4, no momentum", "wine", "h"),
}
AT_BEST_RATES = {
    **_levels(LESS[2:], "0.25 and 0.125 bit, no momentum", "sky", "v", ABOVE),
    **{f"PowerSGD rank {rank}": Style("PowerSGD, by rank", "pink", "p", f"r{rank}", RIGHT) for rank in (1, 4)},
    "fp16": Style("fp16", "black", "P"),
}

Points = list[tuple[Style, Compared]]


def as_people_train(folder: Path, panels: Mapping[str, tuple[str, tuple[Part, ...]]], less: Part, runs: Runs) -> None:
    """Draw panels into an existing folder, each of one task in some parts.

    Args:
        panels: by title.
        less: its task is the first panel's with less momentum, and is drawn uncompressed beside what has less.
    """
    drawn = {title: _of_parts(parts, runs, task) for title, (task, parts) in panels.items()}
    task, (part, *_) = next(iter(panels.values()))
    own = Compared.of(chosen(runs, less, less.tasks[1], BASELINE), chosen(runs, part, task, BASELINE))
    if own:
        drawn[next(iter(panels))].append((Style(LESS_MOMENTUM, "sky", "s"), own))
    _draw(folder / AS_PEOPLE_TRAIN, drawn)


def at_best_rates(folder: Path, panels: Mapping[str, Tuned], runs: Runs) -> None:
    """Draw the rows of parts likewise, by title."""
    styles = AT_BEST_RATES.items()
    found = {
        title: [(style, one) for row, style in styles if row in part.rows and (one := of_tuned(part, runs, row))]
        for title, part in panels.items()
    }
    _draw(folder / BEST_RATES, found)


def _of_parts(parts: Iterable[Part], runs: Runs, task: str) -> Points:
    return [
        (style, found)
        for part in parts
        for name, style in IN_THE_RECIPE.items()
        if name in part.methods and (found := of_part(part, runs, task, name))
    ]


def _draw(path: Path, panels: Mapping[str, Points]) -> None:
    """Panels beside each other; those without points are left out, and so is a figure of none."""
    panels = {title: points for title, points in panels.items() if points}
    if not panels:
        return
    size = (5.2 * len(panels), 4.6)
    figure, grid = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    handles: dict[str, Any] = {}
    for axes, (title, points) in zip(grid.flat, panels.items(), strict=True):
        axes.set(title=title, xlabel="bits per value, everything included")
        for style, found in points:
            _point(axes, style, found, handles)
        _scales(axes)
    grid[0, 0].set_ylabel("test loss against uncompressed, %")
    look: dict[str, Any] = {"frameon": False, "fontsize": 9, "ncols": max(1, int(size[0] / 3))}
    figure.legend(list(handles.values()), list(handles), loc="outside lower center", **look)
    grid[0, -1].text(0.99, 0.01, STAMP, transform=grid[0, -1].transAxes, ha="right", fontsize=7, color=COLOURS["grey"])
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _point(axes: Axes, style: Style, found: Compared, handles: dict[str, Any]) -> None:
    """With a standard error up and down, so of two runs or more; where a run diverged, none is drawn."""
    if found.diverged or found.runs < 2:
        return
    look: dict[str, Any] = {"ms": 6, "mec": "white", "mew": 0.6, "elinewidth": 1, "color": COLOURS[style.colour]}
    line, *_ = axes.errorbar(found.bits, found.loss, found.error, fmt=style.marker, **look)
    if style.marker == "s":
        handles[UNCOMPRESSED] = Line2D([], [], marker="s", ls="", color=COLOURS["grey"])
    else:
        handles[style.legend] = line
    place: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": COLOURS[style.colour]}
    axes.annotate(style.word, (found.bits, found.loss + (style.at == ABOVE) * found.error), **place, **style.at)


def _scales(axes: Axes) -> None:
    axes.set_xscale("log")
    axes.margins(x=0.12)  # words stand there
    axes.axhline(0, color=COLOURS["grey"], lw=0.8)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.3)
