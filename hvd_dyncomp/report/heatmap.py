"""Errors of tensors: one row per tensor, one column per epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvd_dyncomp.report import drawing
from hvd_dyncomp.report.markup import Markup, decimal, element, joined
from hvd_dyncomp.report.runs import Run
from hvd_dyncomp.report.words import epochs, percent

LEAST = 1 / 64  # the error at which colours begin
_ROW = 15  # height
_NAMES = 232  # width of the names
# ColorBrewer's YlGnBu, which keeps its order in grey as well: what is least is light.
_COLOURS = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")


# {tensor: error} by epoch, counted from 0.
Tables = Mapping[int, Mapping[str, float]]


def errors(key: str, run: Run) -> Markup:
    """Relative errors of the means, last step of each epoch. At least one epoch must have errors."""
    tables = {epoch.number: epoch.tensor_errors for epoch in run.epochs}
    found = [error for table in tables.values() for error in table.values()]
    names = list(dict.fromkeys(name for table in tables.values() for name in table))  # in order of first appearance
    first, last = min(tables), max(tables)
    across = drawing.Scale(first - 0.5, last + 0.5, _NAMES, drawing.RIGHT)
    bottom = drawing.TOP + float(_ROW * len(names))
    ends = f"from {percent(min(found), 1)} % to {percent(max(found), 1)} % of the mean's norm"
    return drawing.frame(
        key,
        f"Errors by layer, last step of an epoch: {run.name}",
        f"{len(names)} tensors, {ends}, in {epochs(first, last)}.",
        bottom + 74,
        *(_row(tables, name, drawing.TOP + _ROW * row, across) for row, name in enumerate(names)),
        _epochs(across, first, last, bottom),
        _key(bottom + 56),
    )


def colour(error: float) -> str:
    """The colour on a logarithmic scale: ``LEAST`` and below is lightest, 256 times that or more is darkest."""
    place = _place(error)
    below = min(int(place), len(_COLOURS) - 2)
    ends = [[int(fill[at : at + 2], 16) for at in (1, 3, 5)] for fill in _COLOURS[below : below + 2]]
    mixed = [round(low + (place - below) * (high - low)) for low, high in zip(*ends, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)


def _place(error: float) -> float:
    """The place on the colour scale."""
    return min(math.log2(error / LEAST), len(_COLOURS) - 1.0) if error > LEAST else 0.0


def _whole_percent(error: float) -> str:
    return decimal(100 * error, 0)


def _row(tables: Tables, name: str, top: int, across: drawing.Scale) -> Markup:
    present = [(epoch, table[name]) for epoch, table in tables.items() if name in table]
    wide = across(1) - across(0) >= 18
    shown = name if len(name) <= 36 else f"…{name[-35:]}"  # the end tells tensors apart better
    title = element("title", name)
    cells = [element("text", title, shown, x=_NAMES - 6, y=top + 11, class_="name", text_anchor="end")]
    for first, last, value in drawing.spans(present):
        left, right = across(first - 0.5), across(last + 0.5)
        said = f"{name}, {epochs(first, last)}: error {percent(value, 1)} % of the mean's norm"
        box = {"x": left, "y": top, "width": right - left, "height": _ROW, "data_value": repr(value)}
        fill = colour(value)
        cells.append(element("rect", element("title", said), **box, fill=fill, stroke="#fff", stroke_width=0.5))
        if wide:
            kind = "cell on-dark" if _place(value) >= 4.5 else "cell"  # white text is easier to read on a dark colour
            x = (left + right) / 2
            cells.append(element("text", _whole_percent(value), x=x, y=top + 11, class_=kind, text_anchor="middle"))
    return element("g", *cells, class_="tensor", data_name=name)


def _epochs(across: drawing.Scale, first: int, last: int, bottom: float) -> Markup:
    step = max(1, math.ceil((last - first + 1) / 15))
    parts = [
        element("text", str(epoch + 1), x=across(epoch), y=bottom + 14, class_="tick x", text_anchor="middle")
        for epoch in range(first, last + 1, step)
    ]
    middle = (_NAMES + drawing.RIGHT) / 2
    return joined(*parts, element("text", "epoch", x=middle, y=bottom + 30, class_="label", text_anchor="middle"))


def _key(y: float) -> Markup:
    """What the colours stand for, in a row."""
    parts = [element("text", "of the mean:", x=_NAMES - 6, y=y + 4, class_="legend", text_anchor="end")]
    x = float(_NAMES)
    for mark in (LEAST * 4**power for power in range(5)):
        text = f"{_whole_percent(mark)} %"
        parts.append(element("rect", x=x, y=y - 7, width=14, height=14, fill=colour(mark), stroke="#333"))
        parts.append(element("text", text, x=x + 17, y=y + 4, class_="tick"))
        x += 26 + 6.5 * len(text)
    return joined(*parts)
