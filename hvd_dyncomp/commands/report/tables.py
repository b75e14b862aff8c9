"""What the page shows, in words and numbers. A table is its head and its rows; an int in it stands for a run's name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from hvd_dyncomp.commands.report.runs import Run, all_switches

Rows = list[list[str | int]]
_BY_EPOCH = (
    ("Training accuracy", "training accuracy, %", "train_accuracy", 100),
    ("Validation accuracy", "validation accuracy, %", "val_accuracy", 100),
    ("Test accuracy", "test accuracy, %", "test_accuracy", 100),
    ("Training loss", "training loss, nats", "train_loss", 1),
    ("Validation loss", "validation loss, nats", "val_loss", 1),
    ("Compute", "compute in an epoch, seconds", "seconds_compute", 1),
    ("Exchange", "exchange in an epoch, seconds", "seconds_exchange", 1),
)


class Quantity(NamedTuple):
    """What is shown by epoch: a title, a label with the unit, and for each run one value per epoch or None."""

    title: str
    label: str
    values: list[list[float | None]]


def quantities(runs: Sequence[Run]) -> list[Quantity]:
    """All that at least one run has a value of."""
    found = [Quantity(title, label, _scaled(runs, key, factor)) for title, label, key, factor in _BY_EPOCH]
    megabytes = _scaled(runs, "bytes_sent", 1e-6)
    so_far = [_sums(values) if any(values) else values for values in megabytes]
    found.append(Quantity("Bytes by epoch", "sent per worker in an epoch, MB", megabytes))
    found.append(Quantity("Bytes so far", "sent per worker so far, MB", so_far))
    return [one for one in found if any(value is not None for values in one.values for value in values)]


def _sums(values: list[float | None]) -> list[float | None]:
    return [*accumulate(value or 0.0 for value in values)]


def summary(runs: Sequence[Run]) -> tuple[list[str], Rows]:
    """The result of each run, one row each."""
    head = ["run", "settings", "epochs", "levels, bits", "final test accuracy, %", "best (epoch)"]
    head += ["sent per worker, MB", "% of float32", "minutes", "compute, minutes", "exchange, minutes"]
    rows: Rows = []
    for index, run in enumerate(runs):
        rows.append([index, _settings(run), _epochs(run), _levels(run), *_accuracies(run)])
        sent, whole = run.total("bytes_sent"), run.total("bytes_float32")
        rows[-1] += [_number(sent, 1e6), _number(None if sent is None or not whole else 100 * sent / whole)]
        rows[-1] += [_number(run.total(key), 60) for key in ("seconds", "seconds_compute", "seconds_exchange")]
    return head, rows


def switches(runs: Sequence[Run]) -> tuple[list[str], Rows]:
    """Every change of level and its reason, with its number in the figures."""
    rows: Rows = [
        [str(place), index, str(switch.epoch + 1), f"{switch.before:g}", f"{switch.after:g}", switch.reason or "—"]
        for place, (index, switch) in enumerate(all_switches(runs), start=1)
    ]
    return ["no.", "run", "after epoch", "from, bits", "to, bits", "reason"], rows


def numbers(runs: Sequence[Run], shown: Sequence[Quantity]) -> tuple[list[str], Rows]:
    """What the figures show, by run and epoch."""
    rows: Rows = []
    for index, run in enumerate(runs):
        for place, epoch in enumerate(run.epochs):
            row = [_number(quantity.values[index][place]) for quantity in shown]
            rows.append([index, str(epoch.number + 1), f"{epoch.level:g}", *row])
    return ["run", "epoch", "level, bits", *(quantity.label for quantity in shown)], rows


def flags(runs: Sequence[Run]) -> tuple[list[str | int], Rows]:
    """The flags of all complete runs, side by side."""
    known = [index for index, run in enumerate(runs) if run.config]
    keys = dict.fromkeys(key for index in known for key in runs[index].config)
    return ["flag", *known], [[key, *(_shown(runs[index].config.get(key)) for index in known)] for key in keys]


def _scaled(runs: Sequence[Run], key: str, factor: float) -> list[list[float | None]]:
    return [[None if value is None else factor * value for value in run.values(key)] for run in runs]


def _number(value: float | None, unit: float = 1.0) -> str:
    """The value in a unit, with four digits or more."""
    if value is None:
        return "—"
    return f"{value / unit:.1f}" if 100 <= abs(value / unit) < 1e9 else f"{value / unit:#.4g}"


def _settings(run: Run) -> str:
    """Model, data, workers and compression; the table of flags has the rest."""
    told = {"model": "", "dataset": "", "world_size": " workers", "compression": ""}
    parts = [_shown(run.config[key]) + unit for key, unit in told.items() if run.config.get(key) is not None]
    return ", ".join(parts) or "not known yet"


def _epochs(run: Run) -> str:
    done, planned = len(run.epochs), run.config.get("epochs")
    return f"{done} of {planned}" if type(planned) is int and planned not in (0, done) else str(done)


def _levels(run: Run) -> str:
    """The levels in the order of use; of a long ladder only both ends."""
    steps = [f"{level:g}" for _, _, level in run.spans()]
    return ", ".join(steps if len(steps) <= 7 else [*steps[:3], "…", *steps[-3:]]) or "—"


def _accuracies(run: Run) -> tuple[str, str]:
    """The test accuracy of the last epoch, and the best one with its epoch."""
    values = [None if value is None else 100 * value for value in run.values("test_accuracy")]
    present = [(value, -epoch.number) for value, epoch in zip(values, run.epochs, strict=True) if value is not None]
    if not present:
        return "—", "—"
    best, epoch = max(present)
    return _number(values[-1]), f"{_number(best)} ({1 - epoch})"


def _shown(value: Any) -> str:
    """A flag's value, nearly as the user types it."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and not any(isinstance(item, list | dict) for item in value):
        return ",".join(map(_shown, value))
    return json.dumps(value, ensure_ascii=False)
