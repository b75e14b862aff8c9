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
_LARGEST = 1e100  # what is added up or drawn from here on stays a float


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
        numbers: all other finite numbers of the line.
    """

    number: int
    level: float
    next_level: float | None
    reason: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Run:
    """All that is known of a run.

    Attributes:
        name: unique on the page.
        epochs: ascending; empty until the first one is finished.
        config: the flags; empty until the run is complete.
        cut_short: whether the last line was incomplete, and was left out.
    """

    name: str
    epochs: tuple[Epoch, ...]
    config: Mapping[str, Any]
    cut_short: bool = False

    def values(self, key: str) -> list[float | None]:
        """A number by epoch; None where it is missing or not finite."""
        return [epoch.numbers.get(key) for epoch in self.epochs]

    def total(self, key: str) -> float | None:
        """The sum over all epochs that have the number; None if none has."""
        return sum(present) if (present := [value for value in self.values(key) if value is not None]) else None

    def spans(self) -> list[tuple[int, int, float]]:
        """Neighbouring epochs at the same level, joined: (first, last, level)."""
        found: list[tuple[int, int, float]] = []
        for epoch in self.epochs:
            if found and found[-1][1:] == (epoch.number - 1, epoch.level):
                found[-1] = (found[-1][0], epoch.number, epoch.level)
            else:
                found.append((epoch.number, epoch.number, epoch.level))
        return found

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
    """Read the runs of these folders, each once, in order, under unique names.

    Raises:
        UnreadableRun: a folder has no metrics.jsonl, or a file in it is damaged.
    """
    folders = list(dict.fromkeys(folders))
    names = [folder.resolve().name for folder in folders]
    return [
        replace(read_run(folder), name=name if name and names.count(name) == 1 else str(folder))
        for folder, name in zip(folders, names, strict=True)
    ]


def read_run(folder: Path) -> Run:
    """Read a run, complete or in progress.

    Raises:
        UnreadableRun: there is no metrics.jsonl, or a file is damaged. (An incomplete last line is not damage.)
    """
    epochs, cut_short = _read_metrics(folder / METRICS)
    return Run(folder.name, epochs, _read_config(folder / SUMMARY), cut_short)


def _read_metrics(path: Path) -> tuple[tuple[Epoch, ...], bool]:
    lines = _content(path).removesuffix(b"\n").split(b"\n")
    epochs: list[Epoch] = []
    for number, text in enumerate(lines, start=1):
        line = _parsed(text)
        if not isinstance(line, dict):
            if number == len(lines):
                return tuple(epochs), text != b""
            raise UnreadableRun(f"{path}: line {number} is not a JSON object")
        try:
            epoch = _epoch(line)
        except ValueError as error:
            raise UnreadableRun(f"{path}: line {number} {error}") from None
        while epochs and epochs[-1].number >= epoch.number:  # of before a restart, from a checkpoint before it
            epochs.pop()
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
    number, reason, following = line.get("epoch"), line.get("reason", ""), line.get("next_level")
    if type(number) is not int or not 0 <= number < 2**53:
        raise ValueError("has no epoch number, a whole number from 0, under 'epoch'")
    if not isinstance(reason, str):
        raise ValueError("has a 'reason' that is not a string")
    told = ("epoch", "level", "next_level")
    return Epoch(
        number=number,
        level=_level(line.get("level"), "level"),
        next_level=None if following is None else _level(following, "next_level"),
        reason=reason,
        numbers={key: n for key, value in line.items() if key not in told and (n := _finite(value)) is not None},
    )


def _level(value: Any, key: str) -> float:
    bits = _finite(value)
    if bits is None or not 0 < bits <= 64:
        raise ValueError(f"has no level above 0 and up to 64 bits per value under '{key}'")
    return bits


def _finite(value: Any) -> float | None:
    """A JSON number of a size that can be drawn. JSON's null, NaN and everything else become None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if -_LARGEST < value < _LARGEST else None  # not so for NaN
