"""The files of a run: metrics.jsonl, a line after every epoch, and summary.json, written when it is complete."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
_LARGEST = 1e100  # what is added up, squared or drawn from here on stays a float


class UnreadableRun(Exception):
    """A run cannot be reported. The message is one line with the file and, if known, the line in it."""


class Switch(NamedTuple):
    """A change of level after an epoch (counted from 0)."""

    epoch: int
    before: float
    after: float
    reason: str


@dataclass(frozen=True)
class Epoch:
    """A line of metrics.jsonl.

    Attributes:
        number: counted from 0.
        level: bits per value at the start of the epoch.
        next_level: level decided after it; None if the line does not say.
        reason: of that decision, for people; may be empty.
        steps_by_level: {level: steps}; may be empty.
        tensor_errors: {name: norm of the error of the last step's mean / norm of the mean}; may be empty.
        numbers: all other finite numbers of the line.
    """

    number: int
    level: float
    next_level: float | None
    reason: str
    steps_by_level: Mapping[float, float]
    tensor_errors: Mapping[str, float]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """All that is known of a run.

    Attributes:
        name: unique on the page.
        epochs: ascending; empty until the first one is finished.
        config: the flags; empty until the run is complete.
        planned: number of epochs; None if unknown.
        cut_short: whether the last line was incomplete, and was left out.
    """

    name: str
    epochs: tuple[Epoch, ...]
    config: Mapping[str, Any]
    planned: int | None = None
    cut_short: bool = False

    def values(self, key: str) -> list[float | None]:
        """A number by epoch; None where it is missing or not finite."""
        return [epoch.numbers.get(key) for epoch in self.epochs]

    def total(self, key: str) -> float | None:
        """The sum over all epochs that have the number; None if none has."""
        present = [value for value in self.values(key) if value is not None]
        return sum(present) if present else None

    def switches(self) -> list[Switch]:
        """Every change of level, with the one after the last epoch."""
        found = []
        for epoch, following in zip_longest(self.epochs, self.epochs[1:]):
            level = following.level if following else epoch.level
            after = epoch.next_level if epoch.next_level is not None else level
            if after != epoch.level:
                found.append(Switch(epoch.number, epoch.level, after, epoch.reason))
        return found


def all_switches(runs: Sequence[Run]) -> list[tuple[int, Switch]]:
    """The switches of all runs in one list, each with its run's index. The place in the list is its number."""
    return [(index, switch) for index, run in enumerate(runs) for switch in run.switches()]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the runs of these folders, in order, under unique names.

    Raises:
        UnreadableRun: a folder has no metrics.jsonl, or a file in it is damaged.
    """
    runs: list[Run] = []
    names = [folder.resolve().name for folder in folders]
    for folder, name in zip(folders, names, strict=True):
        wanted = name if names.count(name) == 1 and name else str(folder)
        taken = {run.name for run in runs}
        number = 1
        unique = wanted
        while unique in taken:
            number += 1
            unique = f"{wanted} ({number})"
        runs.append(replace(read_run(folder), name=unique))
    return runs


def read_run(folder: Path) -> Run:
    """Read a run, complete or in progress.

    Raises:
        UnreadableRun: there is no metrics.jsonl, or a file is damaged. (An incomplete last line is not damage.)
    """
    epochs, cut_short = _read_metrics(folder / METRICS)
    config = _read_config(folder / SUMMARY)
    planned = config.get("epochs")
    return Run(folder.name, epochs, config, planned if type(planned) is int else None, cut_short)


def _read_metrics(path: Path) -> tuple[tuple[Epoch, ...], bool]:
    lines = _content(path).split(b"\n")
    if not lines[-1]:
        lines.pop()
    epochs: list[Epoch] = []
    for number, text in enumerate(lines, start=1):
        line = _parsed(text)
        if not isinstance(line, dict):
            if number == len(lines):
                return tuple(epochs), True
            raise UnreadableRun(f"{path}: line {number} is not a JSON object")
        try:
            epoch = _epoch(line)
            if epochs and epoch.number <= epochs[-1].number:
                raise ValueError(f"has epoch {epoch.number} after epoch {epochs[-1].number}")
        except ValueError as error:
            raise UnreadableRun(f"{path}: line {number} {error}") from None
        epochs.append(epoch)
    return tuple(epochs), False


def _read_config(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    summary = _parsed(_content(path))
    if not isinstance(summary, dict) or not isinstance(summary.get("config", {}), dict):
        raise UnreadableRun(f"{path} is not the summary of a run")
    return summary.get("config", {})


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UnreadableRun(f"{path} is missing") from None
    except OSError as error:
        raise UnreadableRun(f"{path} cannot be read: {error.strerror}") from None


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _epoch(line: dict[str, Any]) -> Epoch:
    """The `Epoch` of a line. Raises ValueError with a text that continues "line 3"."""
    number, reason = line.get("epoch"), line.get("reason", "")
    if type(number) is not int or not 0 <= number < 2**53:
        raise ValueError("has no epoch number, a whole number from 0, under 'epoch'")
    if not isinstance(reason, str):
        raise ValueError("has a 'reason' that is not a string")
    following = line.get("next_level")
    told = ("epoch", "level", "next_level")
    return Epoch(
        number=number,
        level=_level(line.get("level"), "level"),
        next_level=None if following is None else _level(following, "next_level"),
        reason=reason,
        steps_by_level={_level(_number(key), "steps_by_level"): n for key, n in _table(line, "steps_by_level")},
        tensor_errors=_errors(line),
        numbers={key: n for key, value in line.items() if key not in told and (n := _finite(value)) is not None},
    )


def _table(line: dict[str, Any], key: str) -> list[tuple[str, float]]:
    """The entries of a JSON object of numbers."""
    table = line.get(key) or {}
    if not isinstance(table, dict) or any(_finite(value) is None for value in table.values()):
        raise ValueError(f"has a '{key}' that is not an object of numbers")
    return list(table.items())


def _errors(line: dict[str, Any]) -> dict[str, float]:
    errors = dict(_table(line, "tensor_errors"))
    if any(error < 0 for error in errors.values()):
        raise ValueError("has a 'tensor_errors' with a negative number")
    return errors


def _level(value: Any, key: str) -> float:
    bits = _finite(value)
    if bits is None or not 0 < bits <= 64:
        raise ValueError(f"has no level above 0 and up to 64 bits per value under '{key}'")
    return bits


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _finite(value: Any) -> float | None:
    """A JSON number of a size that can be drawn. JSON's null, NaN and everything else become None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None  # not so for NaN
