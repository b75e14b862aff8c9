"""What runs have left: metrics.jsonl, a line after every epoch, and summary.json, when they are complete."""

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
    """A run that cannot be reported, in one line that names the file and, where there is one, the line in it."""


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
        level: bits a value that the epoch began with.
        next_level: what was decided after it; None where the line does not say.
        reason: of that decision, for people; may be empty.
        steps_by_level: {level: steps}; may be empty.
        tensor_bytes: {name: bytes} of what was sent, without what is no tensor's; may be empty.
        tensor_errors: {name: norm of the error of the last step's mean / norm of the mean}; may be empty.
        numbers: all other numbers of the line; what is not finite is not among them.
    """

    number: int
    level: float
    next_level: float | None
    reason: str
    steps_by_level: Mapping[float, float]
    tensor_bytes: Mapping[str, float]
    tensor_errors: Mapping[str, float]
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """All that is known of a run.

    Attributes:
        name: tells it apart from the others on the page.
        epochs: ascending; none where the first one is not over yet.
        config: the flags; empty until the run is complete.
        planned: number of epochs; None where that is not known.
        cut_short: whether the last line was half written, and is left out.
    """

    name: str
    epochs: tuple[Epoch, ...]
    config: Mapping[str, Any]
    planned: int | None = None
    cut_short: bool = False

    def values(self, key: str) -> list[float | None]:
        """A number by epoch; None where it is missing, or was not finite."""
        return [epoch.numbers.get(key) for epoch in self.epochs]

    def total(self, key: str) -> float | None:
        """The sum over all epochs that have it; None where none has."""
        present = [value for value in self.values(key) if value is not None]
        return sum(present) if present else None

    def switches(self) -> list[Switch]:
        """Every change of level, the one after the last epoch included."""
        found = []
        for epoch, following in zip_longest(self.epochs, self.epochs[1:]):
            level = following.level if following else epoch.level
            after = epoch.next_level if epoch.next_level is not None else level
            if after != epoch.level:
                found.append(Switch(epoch.number, epoch.level, after, epoch.reason))
        return found


def all_switches(runs: Sequence[Run]) -> list[tuple[int, Switch]]:
    """Those of all runs in one list, whose order is their numbering; each with its run's index."""
    return [(index, switch) for index, run in enumerate(runs) for switch in run.switches()]


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """The runs of these folders, in their order, under names that differ.

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
    """A run, complete or under way.

    Raises:
        UnreadableRun: there is no metrics.jsonl, or a file is damaged; half a last line is no damage.
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
    """Raises ValueError, whose text goes on after "line 3"."""
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
        tensor_bytes=_amounts(line, "tensor_bytes"),
        tensor_errors=_amounts(line, "tensor_errors"),
        numbers={key: n for key, value in line.items() if key not in told and (n := _finite(value)) is not None},
    )


def _table(line: dict[str, Any], key: str) -> list[tuple[str, float]]:
    """The entries of an object of numbers."""
    table = line.get(key) or {}
    if not isinstance(table, dict) or any(_finite(value) is None for value in table.values()):
        raise ValueError(f"has a '{key}' that is not an object of numbers")
    return list(table.items())


def _amounts(line: dict[str, Any], key: str) -> dict[str, float]:
    amounts = dict(_table(line, key))
    if any(amount < 0 for amount in amounts.values()):
        raise ValueError(f"has a '{key}' with a negative number")
    return amounts


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
    """A JSON number of a size that can be drawn; JSON's null, NaN and everything else are None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None  # not so for NaN
