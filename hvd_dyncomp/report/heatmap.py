"""Levels and errors of tensors: a row for each tensor, a column for each epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hvd_dyncomp.report import drawing, layers
from hvd_dyncomp.report.layers import LEAST_LEVEL, NAMES, ROW
from hvd_dyncomp.report.markup import Markup, decimal, element, joined
from hvd_dyncomp.report.runs import Run
from hvd_dyncomp.report.words import bits, epochs, percent

LEAST_ERROR = 1 / 64  # where colours begin


@dataclass(frozen=True)
class _Map:
    """What a map shows.

    Attributes:
        tables: {tensor: value} by epoch, counted from 0.
        least: where colours begin.
        said: a value in the tooltip of its cell.
        short: in the cell itself, where there is room.
    """

    tables: Mapping[int, Mapping[str, float]]
    least: float
    said: Callable[[float], str]
    short: Callable[[float], str]


def levels(key: str, run: Run) -> Markup:
    """Where tensors have levels of their own: one of the run's epochs at least must have some."""
    shown = _Map({epoch.number: epoch.tensor_levels for epoch in run.epochs}, LEAST_LEVEL, bits, _digits)
    used = sorted({level for table in shown.tables.values() for level in table.values()})
    entries = [(decimal(level, 3), layers.colour(level, LEAST_LEVEL)) for level in used]
    ends = f"from {bits(used[0])} to {bits(used[-1])} a value"
    return _draw(key, f"Levels by layer: {run.name}", ends, shown, ("bits a value:", entries))


def errors(key: str, run: Run) -> Markup:
    """How far the means of the last step of each epoch were off; one of the epochs at least must say so."""
    shown = _Map({epoch.number: epoch.tensor_errors for epoch in run.epochs}, LEAST_ERROR, _off, _whole_percent)
    found = [error for table in shown.tables.values() for error in table.values()]
    marks = [LEAST_ERROR * 4**power for power in range(5)]
    entries = [(f"{_whole_percent(mark)} %", layers.colour(mark, LEAST_ERROR)) for mark in marks]
    ends = f"from {percent(min(found), 1)} % to {percent(max(found), 1)} % of the mean's norm"
    return _draw(key, f"Errors by layer, last step of an epoch: {run.name}", ends, shown, ("of the mean:", entries))


def _off(error: float) -> str:
    return f"off by {percent(error, 1)} % of the mean's norm"


def _digits(level: float) -> str:
    return decimal(level, 3)


def _whole_percent(error: float) -> str:
    return decimal(100 * error, 0)


def _draw(key: str, title: str, ends: str, shown: _Map, legend: tuple[str, list[tuple[str, str]]]) -> Markup:
    names = layers.names(list(shown.tables.values()))
    first, last = min(shown.tables), max(shown.tables)
    across = drawing.Scale(first - 0.5, last + 0.5, NAMES, drawing.RIGHT)
    bottom = drawing.TOP + float(ROW * len(names))
    return drawing.frame(
        key,
        title,
        f"{len(names)} tensors, {ends}, in {epochs(first, last)}.",
        bottom + 74,
        *(_row(shown, name, drawing.TOP + ROW * row, across) for row, name in enumerate(names)),
        _epochs(across, first, last, bottom),
        layers.key(*legend, bottom + 56),
    )


def _row(shown: _Map, name: str, top: int, across: drawing.Scale) -> Markup:
    present = [(epoch, table[name]) for epoch, table in shown.tables.items() if name in table]
    wide = across(1) - across(0) >= 18
    cells = []
    for first, last, value in drawing.spans(present):
        left, right = across(first - 0.5), across(last + 0.5)
        title = element("title", f"{name}, {epochs(first, last)}: {shown.said(value)}")
        box = {"x": left, "y": top, "width": right - left, "height": ROW, "data_value": repr(value)}
        fill = layers.colour(value, shown.least)
        cells.append(element("rect", title, **box, fill=fill, stroke="#fff", stroke_width=0.5))
        if wide:
            kind = "cell on-dark" if layers.is_dark(value, shown.least) else "cell"
            x = (left + right) / 2
            cells.append(element("text", shown.short(value), x=x, y=top + 11, class_=kind, text_anchor="middle"))
    return element("g", layers.label(name, top), *cells, class_="tensor", data_name=name)


def _epochs(across: drawing.Scale, first: int, last: int, bottom: float) -> Markup:
    step = max(1, math.ceil((last - first + 1) / 15))
    parts = [
        element("text", str(epoch + 1), x=across(epoch), y=bottom + 14, class_="tick x", text_anchor="middle")
        for epoch in range(first, last + 1, step)
    ]
    middle = (NAMES + drawing.RIGHT) / 2
    return joined(*parts, element("text", "epoch", x=middle, y=bottom + 30, class_="label", text_anchor="middle"))
