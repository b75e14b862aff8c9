"""The page: tables and figures in order, in one file that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources

from hvd_dyncomp.report import bars, curves, heatmap, tables
from hvd_dyncomp.report.curves import Quantity
from hvd_dyncomp.report.markup import Markup, element, joined
from hvd_dyncomp.report.runs import Run

# Nothing is fetched and nothing runs, whatever a run's files may have brought in.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def page(runs: Sequence[Run]) -> str:
    """The HTML of a report of these runs. A run's colour follows its place in the list.

    Examples:
        >>> html = page([Run("low", epochs=(), config={"bits": 4})])
        >>> "low: no epoch is finished yet." in html
        True
    """
    title = f"Training run {runs[0].name}" if len(runs) == 1 else f"{len(runs)} training runs"
    # Between the tags of a style element nothing is escaped; the text is our own.
    style = Markup(resources.files("hvd_dyncomp.report").joinpath("style.css").read_text(encoding="utf-8"))
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("link", rel="icon", href="data:,"),
        element("title", title),
        element("style", style),
    )
    body = element("body", element("h1", title), *_sections(runs))
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _sections(runs: Sequence[Run]) -> Iterator[Markup]:
    yield _section("Summary", element("div", tables.summary(runs), class_="wide"), *_notes(runs))
    started = [run for run in runs if run.epochs]
    if started:
        yield _section("By epoch", _note_on_figures(runs), _grid(_curves(runs)))
        yield _section("Changes of level", element("div", tables.switches(runs), class_="wide"))
        for title, figures in (("By level", list(_levels(runs))), ("By layer", list(_layers(runs)))):
            yield _section(title, _grid(figures)) if figures else Markup("")
        times = [run for run in started if any(run.total(part) for part in (bars.COMPUTE, bars.EXCHANGE))]
        drawn = [_figure(bars.times(f"time-{number}", run, times)) for number, run in enumerate(times, start=1)]
        yield _section("Time", _grid(drawn)) if drawn else Markup("")
    yield _section("Flags", element("div", tables.flags(runs), class_="wide"))


def _notes(runs: Sequence[Run]) -> Iterator[Markup]:
    for run in runs:
        if not run.epochs:
            yield element("p", f"{run.name}: no epoch is finished yet.")
        if run.cut_short:
            yield element("p", f"{run.name}: the last line of its metrics is incomplete and was left out.")


def _note_on_figures(runs: Sequence[Run]) -> Markup:
    several = " A level that never changes is a line only." if len(runs) > 1 else ""
    text = f"The shaded steps are the level (right axis).{several} Dotted lines mark changes of level, numbered as in "
    text += "the table below. Point at a marker to see its value."
    return element("p", text, class_="note")


def quantities(runs: Sequence[Run]) -> list[Quantity]:
    """What is drawn by epoch; left out is what no run has."""
    sent, whose = carried(runs)
    drawn = [
        Quantity(
            "train-accuracy", "Training accuracy by epoch", "training accuracy, %", _percent(runs, "train_accuracy")
        ),
        Quantity("test-accuracy", "Test accuracy by epoch", "test accuracy, %", _percent(runs, "test_accuracy")),
        Quantity("train-loss", "Training loss by epoch", "training loss, nats", [r.values("train_loss") for r in runs]),
        Quantity("bytes", "Bytes by epoch", f"sent {whose} in an epoch, MB", _megabytes(runs, sent), from_zero=True),
        Quantity("bytes-so-far", "Bytes so far", f"sent {whose} so far, MB", _so_far(runs, sent), from_zero=True),
    ]
    return [quantity for quantity in drawn if not quantity.empty()]


def carried(runs: Sequence[Run]) -> tuple[str, str]:
    """The key of the bytes that compression is about in these runs, and their owner, in words.

    From host to host if every run has several hosts; otherwise per worker, to any other worker.
    """
    if all(run.total("bytes_float32_leaving_host") for run in runs if run.epochs):
        return "bytes_leaving_host", "from each host"
    return "bytes_sent", "per worker"


def _percent(runs: Sequence[Run], key: str) -> list[list[float | None]]:
    return [[None if value is None else 100 * value for value in run.values(key)] for run in runs]


def _megabytes(runs: Sequence[Run], key: str) -> list[list[float | None]]:
    return [[None if value is None else value / 1e6 for value in run.values(key)] for run in runs]


def _so_far(runs: Sequence[Run], key: str) -> list[list[float | None]]:
    curves = []
    for values in _megabytes(runs, key):
        total, curve = 0.0, []
        for value in values:
            total += value or 0.0
            curve.append(None if value is None else total)
        curves.append(curve)
    return curves


def _curves(runs: Sequence[Run]) -> list[Markup]:
    return [_figure(curves.draw(quantity, runs)) for quantity in quantities(runs)]


def _levels(runs: Sequence[Run]) -> Iterator[Markup]:
    key, whose = carried(runs)
    if any(run.total(key) is not None for run in runs):
        mixed = any(len(epoch.steps_by_level) > 1 for run in runs for epoch in run.epochs)
        note = "An epoch whose steps had several levels is divided by steps times bits." if mixed else ""
        yield _figure(bars.by_level(runs, bars.bytes_by_level(runs, key), whose), note)


def _layers(runs: Sequence[Run]) -> Iterator[Markup]:
    """Per run, one after the other: their layers may differ."""
    for number, run in enumerate(runs, start=1):
        if any(epoch.tensor_errors for epoch in run.epochs):
            note = "What a step leaves out stays in residuals and arrives later: a sum over many steps is closer. "
            note += "Biases and norms that travel together count under one name."
            yield _figure(heatmap.errors(f"errors-{number}", run), note)


def _figure(drawing: Markup, caption: str = "") -> Markup:
    return element("figure", drawing, element("figcaption", caption) if caption else "")


def _grid(figures: Sequence[Markup]) -> Markup:
    return element("div", *figures, class_="figures")


def _section(title: str, *parts: str) -> Markup:
    return joined(element("section", element("h2", title), *parts))
