"""The tables of the page: a row per run, the changes of level, the flags."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hvd_dyncomp.report import drawing
from hvd_dyncomp.report.markup import Markup, decimal, element, joined
from hvd_dyncomp.report.runs import Run, all_switches
from hvd_dyncomp.report.words import bits, megabytes, minutes, percent, share


def summary(runs: Sequence[Run]) -> Markup:
    """The result of each run, one row each."""
    across_hosts = any(run.total("bytes_float32_leaving_host") for run in runs)
    head = ["run", "settings", "epochs", "levels, bits", "final test accuracy, %", "best (epoch)"]
    head += ["sent per worker, MB", "% of float32"]
    head += ["left each host, MB", "% of float32"] if across_hosts else []
    head += ["minutes", "compute, minutes", "exchange, minutes"]
    rows = []
    for index, run in enumerate(runs):
        cells = [_name(index, run), setting(run), _epochs(run), _levels(run), *_accuracies(run)]
        cells += [megabytes(run.total("bytes_sent")), share(run.total("bytes_sent"), run.total("bytes_float32"))]
        if across_hosts:
            left, float32 = run.total("bytes_leaving_host"), run.total("bytes_float32_leaving_host")
            cells += [megabytes(left), share(left, float32)]
        cells += [minutes(run.total(key)) for key in ("seconds", "seconds_compute", "seconds_exchange")]
        rows.append(cells)
    return table("summary", head, rows, texts=2)


def setting(run: Run) -> str:
    """Model, data, workers and compression in a few words. The table of flags has the rest."""
    config = run.config
    if not config:
        return "not known yet"
    parts = [config.get("model"), config.get("dataset")]
    if config.get("world_size"):
        parts.append(f"{_shown(config['world_size'])} workers")
    if config.get("compression") is not None:
        parts.append(config["compression"])
        parts += [f"{flag} {_shown(config[flag])}" for flag in _telling(config) if flag in config]
    return ", ".join(_shown(part) for part in parts if part is not None)


def _telling(config: Mapping[str, Any]) -> list[str]:
    """The flags that say most about the compression of a run."""
    flags = {"static": ["bits"], "dynamic": ["policy"]}.get(str(config.get("compression")), [])
    if "policy" in flags:
        flags.append({"schedule": "schedule", "static": "bits"}.get(str(config.get("policy")), "levels"))
    return flags


def switches(runs: Sequence[Run]) -> Markup:
    """Every change of level and its reason, with its number in the figures."""
    found = all_switches(runs)
    if not found:
        return element("p", "The level did not change.")
    rows = [
        [str(number), _name(index, runs[index]), str(switch.epoch + 1)]
        + [bits(switch.before), bits(switch.after), switch.reason or "—"]
        for number, (index, switch) in enumerate(found, start=1)
    ]
    return table("switches", ["no.", "run", "after epoch", "from", "to", "reason"], rows, texts=6)


def flags(runs: Sequence[Run]) -> Markup:
    """The flags of all complete runs, side by side; rows with differences are marked."""
    known = [(index, run) for index, run in enumerate(runs) if run.config]
    if not known:
        return element("p", "The flags appear when a run is complete.")
    keys = dict.fromkeys(key for _, run in known for key in run.config)
    head = [element("th", "flag", scope="col"), *(element("th", _name(*one), scope="col") for one in known)]
    rows = []
    for key in keys:
        values = [_shown(run.config.get(key)) for _, run in known]
        kind = "differs" if len(set(values)) > 1 else None
        cells = [element("td", value) for value in values]
        rows.append(element("tr", element("th", key, scope="row"), *cells, class_=kind))
    return element("table", element("thead", element("tr", *head)), element("tbody", *rows), id="flags", class_="texts")


def table(key: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int) -> Markup:
    """A table whose first ``texts`` columns are text, the others numbers. The first cell of a row is its header."""
    header = element("tr", *(element("th", cell, scope="col", class_=_kind(at, texts)) for at, cell in enumerate(head)))
    body = []
    for first, *others in rows:
        cells = [element("td", cell, class_=_kind(at, texts)) for at, cell in enumerate(others, start=1)]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    return element("table", element("thead", header), element("tbody", *body), id=key)


def _kind(column: int, texts: int) -> str | None:
    return None if column < texts else "number"


def _name(index: int, run: Run) -> Markup:
    swatch = element("span", "", class_="swatch", style=f"background:{drawing.colour(index)}")
    return joined(swatch, run.name)


def _epochs(run: Run) -> str:
    done = len(run.epochs)
    return f"{done} of {run.planned}" if run.planned and run.planned != done else str(done)


def _levels(run: Run) -> str:
    """The levels in the order of use; of a long ladder only both ends."""
    steps = [decimal(level, 3) for _, _, level in drawing.spans([(e.number, e.level) for e in run.epochs])]
    if len(steps) > 7:
        steps = [*steps[:3], "…", *steps[-3:]]
    return ", ".join(steps) or "—"


def _accuracies(run: Run) -> tuple[str, str]:
    """The test accuracy of the last epoch, and the best one with its epoch."""
    values = run.values("test_accuracy")
    present = [(value, -epoch.number) for value, epoch in zip(values, run.epochs, strict=True) if value is not None]
    if not present:
        return "—", "—"
    best, epoch = max(present)
    return percent(values[-1]), f"{percent(best)} ({1 - epoch})"


def _shown(value: Any) -> str:
    """A flag's value, nearly as the user types it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ",".join(map(_shown, value))
    return json.dumps(value, ensure_ascii=False)
