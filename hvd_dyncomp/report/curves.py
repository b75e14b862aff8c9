"""Figures with one curve by epoch per run, in front of its level as shaded steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvd_dyncomp.report import drawing
from hvd_dyncomp.report.markup import Markup, decimal, element, joined
from hvd_dyncomp.report.runs import Run, all_switches
from hvd_dyncomp.report.words import bits, epochs, switched

_BOTTOM = drawing.TOP + drawing.PANEL


@dataclass(frozen=True)
class Quantity:
    """What a figure shows.

    Attributes:
        key: name of the figure, unique on the page.
        title: above the figure.
        label: of its axis, with the unit.
        values: for each run, one value per epoch; None where it is missing.
        from_zero: whether the axis begins at 0.
    """

    key: str
    title: str
    label: str
    values: Sequence[Sequence[float | None]]
    from_zero: bool = False

    def empty(self) -> bool:
        return all(value is None for values in self.values for value in values)


def draw(quantity: Quantity, runs: Sequence[Run]) -> Markup:
    """Draw the figure. At least one value must be present."""
    present = [value for values in quantity.values for value in values if value is not None]
    scale, marks = drawing.vertical([*present, *([0.0] if quantity.from_zero else [])], drawing.TOP, _BOTTOM)
    numbers = [epoch.number for run in runs for epoch in run.epochs]
    across = drawing.epoch_scale(min(numbers), max(numbers))
    legend = [(run.name, drawing.line_sign(index)) for index, run in enumerate(runs)]
    return drawing.frame(
        quantity.key,
        quantity.title,
        " ".join(_described(quantity, run, values) for run, values in zip(runs, quantity.values, strict=True)),
        _BOTTOM + 52 + drawing.LEGEND_ROW * len(runs),
        _levels(runs, across),
        drawing.value_axis(scale, marks, quantity.label),
        drawing.epoch_axis(across, _BOTTOM),
        _switches(runs, across),
        *(_curve(index, run, quantity, across, scale) for index, run in enumerate(runs)),
        drawing.legend(legend, _BOTTOM + 56),
    )


def _curve(index: int, run: Run, quantity: Quantity, across: drawing.Scale, scale: drawing.Scale) -> Markup:
    """Lines between neighbours; a missing value interrupts the line."""
    pieces: list[list[str]] = [[]]
    points = []
    colour = drawing.colour(index)
    for epoch, value in zip(run.epochs, quantity.values[index], strict=True):
        if value is None:
            pieces.append([])
            continue
        x, y = across(epoch.number), scale(value)
        pieces[-1].append(f"{decimal(x)},{decimal(y)}")
        said = f"{run.name}, epoch {epoch.number + 1}: {value:.5g} ({quantity.label}), {bits(epoch.level)}"
        points.append(element("circle", element("title", said), cx=x, cy=y, r=_radius(run), fill=colour))
    lines = [
        element("polyline", points=" ".join(piece), stroke=colour, stroke_dasharray=drawing.dash(index))
        for piece in pieces
        if len(piece) > 1
    ]
    return element("g", *lines, *points, class_="curve", data_run=run.name)


def _radius(run: Run) -> float:
    return 3.0 if len(run.epochs) <= 60 else 1.5


def _levels(runs: Sequence[Run], across: drawing.Scale) -> Markup:
    """Every run's level, on an axis of its own; filled if it changes, or if there is only one run."""
    levels = [epoch.level for run in runs for epoch in run.epochs]
    # The lower edge lies below the lowest level in use, so that it is seen.
    scale = drawing.Scale(min(levels) / 1.5, max(*levels, 32) * 1.25, _BOTTOM, drawing.TOP, logarithmic=True)
    parts = []
    for index, run in enumerate(runs):
        filled = len(runs) == 1 or len({epoch.level for epoch in run.epochs}) > 1
        parts.append(_steps(index, run, across, scale, filled=filled))
    return joined(*parts, drawing.level_axis(scale))


def _steps(index: int, run: Run, across: drawing.Scale, scale: drawing.Scale, *, filled: bool) -> Markup:
    """Epoch e is a box from e - 1/2 to e + 1/2, centred under its points."""
    colour = drawing.colour(index)
    boxes, edges = [], []
    for first, last, level in drawing.spans([(epoch.number, epoch.level) for epoch in run.epochs]):
        left, right, y = across(first - 0.5), across(last + 0.5), scale(level)
        said = f"{run.name}, {epochs(first, last)}: {bits(level)}"
        box = {"x": left, "y": y, "width": right - left, "height": _BOTTOM - y}
        title = element("title", said)
        boxes.append(element("rect", title, **box, fill=colour if filled else "none", fill_opacity=0.12))
        edges.append(f"M{decimal(left)} {decimal(y)}H{decimal(right)}")
    edge = element("path", d="".join(edges), stroke=colour, stroke_opacity=0.45, fill="none")
    return element("g", *boxes, *([edge] if edges else []), class_="levels", data_run=run.name)


def _switches(runs: Sequence[Run], across: drawing.Scale) -> Markup:
    """A dotted line after the epoch that decided a switch, with its number in the table below the figures."""
    parts = []
    for number, (index, switch) in enumerate(all_switches(runs), start=1):
        x = across(switch.epoch + 0.5)
        y = drawing.TOP + 10.0 + 11 * (index % 8)
        said = f"{number}. {runs[index].name}, {switched(switch)}"
        line = {"x1": x, "x2": x, "y1": float(drawing.TOP), "y2": float(_BOTTOM), "stroke": drawing.colour(index)}
        text = element("text", str(number), x=x - 3, y=y, class_="switch", text_anchor="end")
        parts.append(element("g", element("title", said), element("line", **line, class_="switch"), text))
    return joined(*parts)


def _described(quantity: Quantity, run: Run, values: Sequence[float | None]) -> str:
    present = [(epoch.number, value) for epoch, value in zip(run.epochs, values, strict=True) if value is not None]
    if not present:
        return f"{run.name}: no values."
    (first, begin), (last, end) = present[0], present[-1]
    if first == last:
        return f"{run.name}: {begin:.4g} in epoch {first + 1}."
    return f"{run.name}: {begin:.4g} in epoch {first + 1}, {end:.4g} in epoch {last + 1}."
