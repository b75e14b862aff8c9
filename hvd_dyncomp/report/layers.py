"""Shared by figures with one row per tensor: names before the rows, and colours for ordered values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hvd_dyncomp.report.markup import Markup, element, joined
from hvd_dyncomp.report.runs import Run

ROW = 15  # height
NAMES = 232  # width of the names
LEAST_LEVEL = 1 / 8  # bits a value, where colours of levels begin
# ColorBrewer's YlGnBu, which keeps its order in grey as well: what is least is light.
_COLOURS = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")


def names(tables: Sequence[Mapping[str, float]]) -> list[str]:
    """All tensors in the tables of a run's epochs, in the order of first appearance."""
    return list(dict.fromkeys(name for table in tables for name in table))


def label(name: str, top: float) -> Markup:
    """A tensor's name before its row. A long name keeps its end, which tells tensors apart better."""
    shown = name if len(name) <= 36 else f"…{name[-35:]}"
    return element("text", element("title", name), shown, x=NAMES - 6, y=top + 11, class_="name", text_anchor="end")


def colour(value: float, least: float) -> str:
    """The colour on a logarithmic scale: ``least`` and below is lightest, 256 times that or more is darkest."""
    place = _place(value, least)
    below = min(int(place), len(_COLOURS) - 2)
    ends = [[int(fill[at : at + 2], 16) for at in (1, 3, 5)] for fill in _COLOURS[below : below + 2]]
    mixed = [round(low + (place - below) * (high - low)) for low, high in zip(*ends, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def is_dark(value: float, least: float) -> bool:
    """Whether white text is easier to read than black on that colour."""
    return _place(value, least) >= 4.5


def _place(value: float, least: float) -> float:
    """The place on the colour scale."""
    return min(math.log2(value / least), len(_COLOURS) - 1.0) if value > least else 0.0


def key(said: str, entries: Sequence[tuple[str, str]], y: float) -> Markup:
    """What the colours stand for: (text, colour) in a row."""
    parts = [element("text", said, x=NAMES - 6, y=y + 4, class_="legend", text_anchor="end")]
    x = float(NAMES)
    for text, fill in entries:
        parts.append(element("rect", x=x, y=y - 7, width=14, height=14, fill=fill, stroke="#333"))
        parts.append(element("text", text, x=x + 17, y=y + 4, class_="tick"))
        x += 26 + 6.5 * len(text)
    return joined(*parts)


def levels_used(run: Run) -> list[float]:
    """All levels at which a run's epochs began, ascending."""
    return sorted({epoch.level for epoch in run.epochs})
