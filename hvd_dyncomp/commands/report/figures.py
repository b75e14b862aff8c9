"""The figures, drawn by matplotlib. No text of a run's files is in them: names are in the page's own tables."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence

from hvd_dyncomp.commands.report.runs import Run, all_switches
from hvd_dyncomp.commands.report.tables import Quantity

try:
    from matplotlib import style
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator
except ImportError as error:
    raise ImportError("the report needs matplotlib: run 'pip install hvd_dyncomp[report]'") from error

# Each has a contrast of 3 or more on the page's white and on its dark background; line styles tell runs apart, too.
_COLOURS = ("#2f7fc1", "#d55e00", "#009e73", "#c6609b", "#808080", "#a98200", "#8c6bd6")
_DASHES = ("", "8 4", "2 3", "10 3 2 3", "5 2", "1 4", "12 3")
_INK = "#010203"  # stands for the colour of the page's text, light or dark
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
_LOOKS = {
    **{"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans"], "font.size": 9, "lines.scale_dashes": False},
    **{"figure.facecolor": "none", "axes.facecolor": "none", "axes.spines.top": False, "axes.spines.right": False},
    **{"axes.formatter.useoffset": False, "grid.alpha": 0.2, **dict.fromkeys(_INKED, _INK)},
}
_LEVELS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def colour(run: int) -> str:
    """Colour of the run with this index."""
    return _COLOURS[run % len(_COLOURS)]


def dash(run: int) -> str:
    """Line style of a run, as in SVG. Colours repeat after seven runs; styles then shift by one."""
    return _DASHES[(run + run // len(_COLOURS)) % len(_DASHES)]


@style.context(["default", _LOOKS])
def by_epoch(quantity: Quantity, runs: Sequence[Run]) -> Figure:
    """A curve per run in front of its level as shaded steps; switches are dotted lines, numbered as in the table."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="epoch", ylabel=quantity.label)
    axes.xaxis.set_major_locator(MaxNLocator(15, integer=True))
    axes.margins(x=0)
    axes.grid(axis="y")
    _levels(axes.twinx(), runs)
    axes.set_zorder(1)  # in front of the levels
    for index, (run, values) in enumerate(zip(runs, quantity.values, strict=True)):
        dashes = tuple(map(float, dash(index).split()))
        axes.plot(
            [epoch.number + 1 for epoch in run.epochs],
            [math.nan if value is None else value for value in values],  # NaN interrupts the line
            color=colour(index),
            linestyle=(0, dashes) if dashes else "-",
            marker="o",
            markersize=4 if len(run.epochs) <= 60 else 2,
        )
    if quantity.label.endswith(("seconds", "MB")):  # amounts, which lengths compare
        axes.set_ylim(bottom=0)
    for number, (index, switch) in enumerate(all_switches(runs), start=1):
        axes.axvline(switch.epoch + 1.5, color=colour(index), linestyle=(0, (1, 3)), linewidth=1)
        place = (switch.epoch + 1.5, 0.97 - 0.04 * (index % 8))
        axes.text(*place, f"{number} ", transform=axes.get_xaxis_transform(), fontsize=7, ha="right")
    return figure


def _levels(axes: Axes, runs: Sequence[Run]) -> None:
    """Every run's level, on an axis of its own; shaded if it changes, or if there is only one run."""
    levels = [epoch.level for run in runs for epoch in run.epochs]
    low, high = min(levels) / 1.5, max(*levels, 32) * 1.25  # the lowest level in use is seen, too
    axes.set_yscale("log", base=2)
    axes.set(ylim=(low, high), ylabel="level, bits per value (shaded)")
    ticks = [bits for bits in _LEVELS if low <= bits <= high]
    axes.set_yticks(ticks, [f"{bits:g}" for bits in ticks])
    axes.minorticks_off()
    for index, run in enumerate(runs):
        for first, last, level in run.spans():
            edges = first + 0.5, last + 1.5  # an epoch's step is centred under its point
            axes.plot(edges, (level, level), color=colour(index), alpha=0.45, linewidth=1)
            if len(runs) == 1 or len({epoch.level for epoch in run.epochs}) > 1:
                axes.fill_between(edges, level, low, color=colour(index), alpha=0.15, linewidth=0)


def svg(figure: Figure, key: str) -> str:
    """The figure as an SVG element, the same each time. Its references have names that follow from ``key``."""
    file = io.StringIO()
    about = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with style.context(["default", _LOOKS, {"svg.hashsalt": key}]):
        figure.savefig(file, format="svg", metadata=about)
    _, start, drawing = file.getvalue().partition("<svg")
    # Several figures of a page would have the same ids; only those of definitions are referred to.
    return start + re.sub(r'<g id="[\w.]+">', "<g>", drawing).replace(_INK, "currentColor")
