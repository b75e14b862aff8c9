"""Shared by all figures: scales, axes, colours of runs, legend, and the frame with its text for screen readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hvd_dyncomp.report.markup import Markup, decimal, element, joined

# Okabe and Ito's colours, which colour-blind readers tell apart, but for their yellow, which white paper swallows.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES = (None, "8 4", "2 3", "10 3 2 3", "5 2", "1 4", "12 3")

WIDTH = 720
LEFT, RIGHT = 76, 660  # of the area between the axes
TOP = 34
PANEL = 280  # its height
LEGEND_ROW = 18
LEVEL_TICKS = (0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)


def colour(run: int) -> str:
    """Colour of the run with this index."""
    return _COLOURS[run % len(_COLOURS)]


def dash(run: int) -> str | None:
    """Line style of a run, for print. Colours repeat after seven runs; styles then shift by one."""
    return _DASHES[(run + run // len(_COLOURS)) % len(_DASHES)]


@dataclass(frozen=True)
class Scale:
    """From values to places: ``low`` is at ``start``, ``high`` at ``end``."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.logarithmic:
            value, low, high = math.log2(value), math.log2(low), math.log2(high)
        return self.start + (value - low) / (high - low) * (self.end - self.start)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers from at or below ``low`` to at or above ``high``, in round steps: 1, 2, 5, 10 ..."""
    size = max(abs(low), abs(high))
    if size < 1e-100:
        low, high = 0.0, 1.0
    elif high - low <= 1e-9 * size:  # one value, or values that no axis could tell apart
        low, high = low - size / 2, high + size / 2
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(factor * power for factor in (1, 2, 5, 10, 20) if (high - low) / (factor * power) <= most)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, last + 1)]


def labels(values: Sequence[float]) -> list[str]:
    """Labels of two or more ticks, with as many decimals as their distance needs."""
    step = abs(values[1] - values[0])
    if step < 1e-6 or step >= 1e6:
        return [f"{value:.6g}" for value in values]
    places = max(0, -math.floor(math.log10(step) + 1e-9))
    return [decimal(value, places) for value in values]


def vertical(values: Sequence[float], top: float, bottom: float) -> tuple[Scale, list[float]]:
    """A linear vertical scale for ``values``, and its ticks."""
    marks = ticks(min(values), max(values))
    return Scale(marks[0], marks[-1], bottom, top), marks


def epoch_scale(first: int, last: int) -> Scale:
    """A scale for epochs, counted from 0, with half an epoch of room on both sides."""
    return Scale(first - 0.5, last + 0.5, LEFT, RIGHT)


def epoch_axis(scale: Scale, bottom: float) -> Markup:
    """Ticks and label below. Labels count epochs from 1."""
    first, last = round(scale.low + 0.5), round(scale.high - 0.5)
    step = max(1, math.ceil((last - first + 1) / 15))
    parts = [_line(LEFT, bottom, RIGHT, bottom, "axis")]
    for epoch in range(first, last + 1, step):
        x = scale(epoch)
        parts.append(_line(x, bottom, x, bottom + 4, "axis"))
        parts.append(element("text", str(epoch + 1), x=x, y=bottom + 17.0, class_="tick x", text_anchor="middle"))
    middle = (LEFT + RIGHT) / 2
    parts.append(element("text", "epoch", x=middle, y=bottom + 34.0, class_="label", text_anchor="middle"))
    return joined(*parts)


def value_axis(scale: Scale, marks: Sequence[float], label: str) -> Markup:
    """Grid lines, ticks and the label on the left."""
    parts = []
    for value, text in zip(marks, labels(marks), strict=True):
        y = scale(value)
        parts.append(_line(LEFT, y, RIGHT, y, "grid"))
        parts.append(element("text", text, x=LEFT - 6.0, y=y + 4, class_="tick y", text_anchor="end"))
    return joined(*parts, upright(label, 16.0, (scale.start + scale.end) / 2))


def level_axis(scale: Scale) -> Markup:
    """Levels, on the right."""
    parts = []
    for bits in LEVEL_TICKS:
        if scale.low <= bits <= scale.high:
            text = decimal(bits, 3)
            parts.append(element("text", text, x=RIGHT + 6.0, y=scale(bits) + 4, class_="tick level"))
    return joined(*parts, upright("level, bits per value (shaded)", WIDTH - 8.0, (scale.start + scale.end) / 2))


def upright(text: str, x: float, y: float) -> Markup:
    """The label of a vertical axis, centred at this place."""
    turned = f"rotate(-90 {decimal(x)} {decimal(y)})"
    return element("text", text, x=x, y=y, class_="label", text_anchor="middle", transform=turned)


def legend(entries: Sequence[tuple[str, Markup]], top: float) -> Markup:
    """One row per entry: its sign, 28 wide, and its name, cut if it is too long for the figure."""
    parts = []
    for row, (name, sign) in enumerate(entries):
        y = top + row * LEGEND_ROW
        shown = name if len(name) <= 88 else f"{name[:87]}…"
        text = element("text", element("title", name), shown, x=LEFT + 36.0, y=y + 4, class_="legend")
        parts.append(element("g", element("g", sign, transform=f"translate({LEFT} {decimal(y)})"), text))
    return joined(*parts)


def line_sign(run: int) -> Markup:
    """A run's line, for the legend."""
    sign = element("line", x1=0, y1=0, x2=28, y2=0, stroke=colour(run), stroke_width=2, stroke_dasharray=dash(run))
    return joined(sign, element("circle", cx=14, cy=0, r=3, fill=colour(run)))


def box_sign(fill: str) -> Markup:
    """A filled box, for the legend."""
    return element("rect", x=6, y=-6, width=16, height=12, fill=fill, stroke="#333", stroke_width=0.5)


def frame(key: str, title: str, description: str, height: float, *parts: str) -> Markup:
    """The SVG element of a figure; it fills the width that there is.

    Args:
        key: name of the figure, unique on the page, for references between its parts.
        title, description: screen readers read them; the title is also above the figure.
        height: for a width of 720.
        parts: the content.
    """
    return element(
        "svg",
        element("title", title, id=f"{key}-title"),
        element("desc", description, id=f"{key}-description"),
        element("text", title, x=LEFT, y=18, class_="title"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {WIDTH} {decimal(height)}",
        role="img",
        aria_labelledby=f"{key}-title {key}-description",
        id=key,
    )


def spans(values: Sequence[tuple[int, float]]) -> list[tuple[int, int, float]]:
    """Neighbouring epochs of the same value, joined: (first, last, value)."""
    found: list[tuple[int, int, float]] = []
    for epoch, value in values:
        if found and found[-1][1] == epoch - 1 and found[-1][2] == value:
            found[-1] = (found[-1][0], epoch, value)
        else:
            found.append((epoch, epoch, value))
    return found


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=float(x1), y1=float(y1), x2=float(x2), y2=float(y2), class_=kind)
