"""Errors of tensors: one row per tensor, one column per epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping

from hvd_dyncomp.report import drawing, layers
from hvd_dyncomp.report.layers import NAMES, ROW
from hvd_dyncomp.report.markup import Markup, decimal, element, joined
from hvd_dyncomp.report.runs import Run
from hvd_dyncomp.report.words import epochs, percent

LEAST_ERROR = 1 / 64  # where colours begin


# {tensor: error} by epoch, counted from 0.
Tables = Mapping[int, Mapping[str, float]]


def errors(key: str, run: Run) -> Markup:
    """Relative errors of the means, last step of each epoch. At least one epoch must have errors."""
    tables = {epoch.number: epoch.tensor_errors for epoch in run.epochs}
    found = [error for table in tables.values() for error in table.values()]
    marks = [LEAST_ERROR * 4**power for power in range(5)]
    entries = [(f"{_whole_percent(mark)} %", layers.colour(mark, LEAST_ERROR)) for mark in marks]
    names = layers.names(list(tables.values()))
    first, last = min(tables), max(tables)
    across = drawing.Scale(first - 0.5, last + 0.5, NAMES, drawing.RIGHT)
    bottom = drawing.TOP + float(ROW * len(names))
    ends = f"from {percent(min(found), 1)} % to {percent(max(found), 1)} % of the mean's norm"
    return drawing.frame(
        key,
        f"Errors by layer, last step of an epoch: {run.name}",
        f"{len(names)} tensors, {ends}, in {epochs(first, last)}.",
        bottom + 74,
        *(_row(tables, name, drawing.TOP + ROW * row, across) for row, name in enumerate(names)),
        _epochs(across, first, last, bottom),
        layers.key("of the mean:", entries, bottom + 56),
    )


def _whole_percent(error: float) -> str:
    return decimal(100 * error, 0)


def _row(tables: Tables, name: str, top: int, across: drawing.Scale) -> Markup:
    present = [(epoch, table[name]) for epoch, table in tables.items() if name in table]
    wide = across(1) - across(0) >= 18
    cells = []
    for first, last, value in drawing.spans(present):
        left, right = across(first - 0.5), across(last + 0.5)
        said = f"{name}, {epochs(first, last)}: error {percent(value, 1)} % of the mean's norm"
        box = {"x": left, "y": top, "width": right - left, "height": ROW, "data_value": repr(value)}
        fill = layers.colour(value, LEAST_ERROR)
        cells.append(element("rect", element("title", said), **box, fill=fill, stroke="#fff", stroke_width=0.5))
        if wide:
            kind = "cell on-dark" if layers.is_dark(value, LEAST_ERROR) else "cell"
            x = (left + right) / 2
            cells.append(element("text", _whole_percent(value), x=x, y=top + 11, class_=kind, text_anchor="middle"))
    return element("g", layers.label(name, top), *cells, class_="tensor", data_name=name)


def _epochs(across: drawing.Scale, first: int, last: int, bottom: float) -> Markup:
    step = max(1, math.ceil((last - first + 1) / 15))
    parts = [
        element("text", str(epoch + 1), x=across(epoch), y=bottom + 14, class_="tick x", text_anchor="middle")
        for epoch in range(first, last + 1, step)
    ]
    middle = (NAMES + drawing.RIGHT) / 2
    return joined(*parts, element("text", "epoch", x=middle, y=bottom + 30, class_="label", text_anchor="middle"))
