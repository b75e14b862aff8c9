"""The levels of tensors, where they have levels of their own: a row for each tensor, a column for each epoch."""

from __future__ import annotations

import math

from hvd_dyncomp.report import drawing
from hvd_dyncomp.report.markup import Markup, decimal, element, joined
from hvd_dyncomp.report.runs import Run
from hvd_dyncomp.report.words import bits, epochs

# ColorBrewer's YlGnBu, which keeps its order in grey as well: few bits are light.
_COLOURS = ("#ffffd9", "#edf8b1", "#c7e9b4", "#7fcdbb", "#41b6c4", "#1d91c0", "#225ea8", "#253494", "#081d58")
_ROW = 15
_NAMES = 232  # width of the names


def draw(key: str, run: Run) -> Markup:
    """The heat map of a run; one of its epochs at least must have levels by tensor."""
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch.tensor_levels))
    first, last = run.epochs[0].number, run.epochs[-1].number
    across = drawing.Scale(first - 0.5, last + 0.5, _NAMES, drawing.RIGHT)
    bottom = drawing.TOP + float(_ROW * len(names))
    used = sorted({level for epoch in run.epochs for level in epoch.tensor_levels.values()})
    rows = [_row(run, name, drawing.TOP + _ROW * row, across) for row, name in enumerate(names)]
    return drawing.frame(
        key,
        f"Levels by layer: {run.name}",
        f"{len(names)} tensors, from {bits(used[0])} to {bits(used[-1])} a value, in {epochs(first, last)}.",
        bottom + 74,
        *rows,
        _epochs(across, first, last, bottom),
        _key(used, bottom + 56),
    )


def colour(level: float) -> str:
    """By the level's logarithm, from 1/8 bit to 32 bits."""
    place = round(math.log2(level)) + 3
    return _COLOURS[min(max(place, 0), len(_COLOURS) - 1)]


def _row(run: Run, name: str, top: int, across: drawing.Scale) -> Markup:
    present = [(epoch.number, epoch.tensor_levels[name]) for epoch in run.epochs if name in epoch.tensor_levels]
    wide = across(1) - across(0) >= 18
    cells = []
    for first, last, level in drawing.spans(present):
        left, right = across(first - 0.5), across(last + 0.5)
        title = element("title", f"{name}, {epochs(first, last)}: {bits(level)}")
        box = {"x": left, "y": top, "width": right - left, "height": _ROW, "data_level": level}
        cells.append(element("rect", title, **box, fill=colour(level), stroke="#fff", stroke_width=0.5))
        if wide:
            cells.append(_number(level, (left + right) / 2, top))
    # The end of a name tells tensors apart better than its beginning.
    shown = name if len(name) <= 36 else f"…{name[-35:]}"
    said = element("text", element("title", name), shown, x=_NAMES - 6, y=top + 11, class_="name", text_anchor="end")
    return element("g", said, *cells, class_="tensor", data_name=name)


def _number(level: float, x: float, top: int) -> Markup:
    kind = "cell on-dark" if level >= 4 else "cell"
    return element("text", decimal(level, 3), x=x, y=top + 11, class_=kind, text_anchor="middle")


def _epochs(across: drawing.Scale, first: int, last: int, bottom: float) -> Markup:
    step = max(1, math.ceil((last - first + 1) / 15))
    parts = [
        element("text", str(epoch + 1), x=across(epoch), y=bottom + 14, class_="tick x", text_anchor="middle")
        for epoch in range(first, last + 1, step)
    ]
    middle = (_NAMES + drawing.RIGHT) / 2
    return joined(*parts, element("text", "epoch", x=middle, y=bottom + 30, class_="label", text_anchor="middle"))


def _key(used: list[float], y: float) -> Markup:
    parts = [element("text", "bits a value:", x=_NAMES - 6, y=y + 4, class_="legend", text_anchor="end")]
    for place, level in enumerate(used):
        x = _NAMES + place * 48
        parts.append(element("rect", x=x, y=y - 7, width=14, height=14, fill=colour(level), stroke="#333"))
        parts.append(element("text", decimal(level, 3), x=x + 17, y=y + 4, class_="tick"))
    return joined(*parts)
