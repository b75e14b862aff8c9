"""Figures with bars: time by epoch, bytes by level."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvd_dyncomp.report import drawing
from hvd_dyncomp.report.markup import Markup, element, joined
from hvd_dyncomp.report.runs import Run
from hvd_dyncomp.report.words import UNCOMPRESSED, bits, megabytes

COMPUTE, EXCHANGE = "seconds_compute", "seconds_exchange"
_PARTS = {COMPUTE: ("compute", "#56B4E9"), EXCHANGE: ("exchange", "#D55E00")}
_BAR = 18  # height of a bar of bytes


def times(key: str, run: Run, runs: Sequence[Run]) -> Markup:
    """Seconds of a run by epoch, compute below exchange. The axes fit all ``runs``, so that figures can be compared."""
    bottom = drawing.TOP + drawing.PANEL * 2 / 3
    sums = [_seconds(other, COMPUTE, at) + _seconds(other, EXCHANGE, at) for other in runs for at in _places(other)]
    scale, marks = drawing.vertical([0.0, *sums], drawing.TOP, bottom)
    numbers = [epoch.number for other in runs for epoch in other.epochs]
    across = drawing.epoch_scale(min(numbers), max(numbers))
    legend = [(name, drawing.box_sign(fill)) for name, fill in _PARTS.values()]
    totals = ", ".join(f"{name} {run.total(part) or 0:.1f} seconds" for part, (name, _) in _PARTS.items())
    return drawing.frame(
        key,
        f"Time in compute and exchange by epoch: {run.name}",
        f"All epochs: {totals}.",
        bottom + 56 + drawing.LEGEND_ROW * len(legend),
        drawing.value_axis(scale, marks, "time of an epoch, seconds"),
        drawing.epoch_axis(across, bottom),
        *(_stack(run, at, across, scale) for at in _places(run)),
        drawing.legend(legend, bottom + 56),
    )


def _stack(run: Run, at: int, across: drawing.Scale, scale: drawing.Scale) -> Markup:
    """The bars of an epoch, one on top of the other."""
    number = run.epochs[at].number
    left, right = across(number - 0.38), across(number + 0.38)
    base, boxes = 0.0, []
    for part, (name, fill) in _PARTS.items():
        seconds = _seconds(run, part, at)
        top = scale(base + seconds)
        title = element("title", f"epoch {number + 1}: {name} {seconds:.2f} s")
        box = {"x": left, "y": top, "width": right - left, "height": scale(base) - top, "class_": part}
        boxes.append(element("rect", title, **box, fill=fill, stroke="#333", stroke_width=0.4))
        base += seconds
    return joined(*boxes)


def _places(run: Run) -> range:
    return range(len(run.epochs))


def _seconds(run: Run, part: str, at: int) -> float:
    return max(0.0, run.epochs[at].numbers.get(part, 0.0))


def bytes_by_level(runs: Sequence[Run], key: str) -> list[dict[float, float]]:
    """Bytes of each run by the level at which they were sent.

    An epoch whose steps had several levels is divided among them by steps times bits, because its line has only the
    sum.
    """
    found = []
    for run in runs:
        by_level: dict[float, float] = {}
        for epoch, nbytes in zip(run.epochs, run.values(key), strict=True):
            for level, part in _parts(epoch.steps_by_level, epoch.level).items():
                by_level[level] = by_level.get(level, 0.0) + part * max(0.0, nbytes or 0.0)
        found.append(by_level)
    return found


def _parts(steps: Mapping[float, float], level: float) -> dict[float, float]:
    weights = {bits: bits * count for bits, count in steps.items() if count > 0}
    total = sum(weights.values())
    return {bits: weight / total for bits, weight in weights.items()} if total else {level: 1.0}


def by_level(runs: Sequence[Run], sent: Sequence[Mapping[float, float]], whose: str) -> Markup:
    """Horizontal bars of MB: a group per level, with a bar for each run that was at it."""
    rows = [
        (level, index, by_level[level])
        for level in sorted({level for by_level in sent for level in by_level})
        for index, by_level in enumerate(sent)
        if level in by_level
    ]
    bottom = drawing.TOP + 12.0 + len(rows) * (_BAR + 4)
    marks = drawing.ticks(0.0, max(nbytes / 1e6 for _, _, nbytes in rows) or 1.0)
    across = drawing.Scale(marks[0], marks[-1], drawing.LEFT, drawing.RIGHT - 20)
    legend = [(run.name, drawing.box_sign(drawing.colour(index))) for index, run in enumerate(runs)]
    return drawing.frame(
        "bytes-by-level",
        "Bytes by level",
        " ".join(f"{runs[index].name}: {megabytes(nbytes)} MB at {bits(level)}." for level, index, nbytes in rows),
        bottom + 56 + drawing.LEGEND_ROW * len(runs),
        _axis(across, marks, bottom, f"sent {whose} in all epochs, MB"),
        drawing.upright("level", 16.0, (drawing.TOP + bottom) / 2),
        *(_row(place, rows, runs, across) for place in range(len(rows))),
        drawing.legend(legend, bottom + 56),
    )


def _row(place: int, rows: Sequence[tuple[float, int, float]], runs: Sequence[Run], across: drawing.Scale) -> Markup:
    """A bar with its MB behind it. The first bar of a level has the level before it."""
    level, index, nbytes = rows[place]
    y = drawing.TOP + 8.0 + place * (_BAR + 4)
    end = across(nbytes / 1e6)
    title = element("title", f"{runs[index].name}: {megabytes(nbytes)} MB at {bits(level)}")
    box = {"x": float(drawing.LEFT), "y": y, "width": end - drawing.LEFT, "height": _BAR}
    bar = element("rect", title, **box, fill=drawing.colour(index), class_="bytes", data_level=level)
    text = element("text", megabytes(nbytes), x=end + 4, y=y + 13, class_="tick")
    if place and rows[place - 1][0] == level:
        return joined(bar, text)
    called = "32 (none)" if level == UNCOMPRESSED else bits(level)
    return joined(
        element("text", called, x=drawing.LEFT - 6.0, y=y + 13, class_="tick y", text_anchor="end"), bar, text
    )


def _axis(across: drawing.Scale, marks: Sequence[float], bottom: float, label: str) -> Markup:
    parts = []
    for value, text in zip(marks, drawing.labels(marks), strict=True):
        x = across(value)
        parts.append(element("line", x1=x, x2=x, y1=float(drawing.TOP), y2=bottom, class_="grid"))
        parts.append(element("text", text, x=x, y=bottom + 15, class_="tick x", text_anchor="middle"))
    middle = (across.start + drawing.RIGHT) / 2
    return joined(*parts, element("text", label, x=middle, y=bottom + 34, class_="label", text_anchor="middle"))
