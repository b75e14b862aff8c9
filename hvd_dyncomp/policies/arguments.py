"""Checks of arguments that several policies share: levels and names of metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_dyncomp.checks import sequence, shown
from hvd_dyncomp.levels import check_level
from hvd_dyncomp.policies.base import Record

AUTO = "auto"
# What Lightning and Transformers, in this order, call an accuracy.
ACCURACIES = ("val_accuracy", "eval_accuracy")


def ascending_levels(levels: Any) -> tuple[float, ...]:
    """One or more levels, each with more bits than the one before.

    Raises:
        ValueError, TypeError: `levels` is something else; the message names `levels` and the value.
    """
    plain = tuple(check_level("levels", bits) for bits in sequence("levels", levels))
    if not plain or not _ascend(plain):
        raise ValueError(f"levels must be one or more ascending levels, got {shown(levels)}")
    return plain


def one_way_levels(levels: Any) -> tuple[float, ...]:
    """One or more levels, all ascending or all descending.

    Raises:
        ValueError, TypeError: `levels` is something else; the message names `levels` and the value.
    """
    plain = tuple(check_level("levels", bits) for bits in sequence("levels", levels))
    if not plain or not (_ascend(plain) or _ascend(plain[::-1])):
        raise ValueError(f"levels must be one or more levels, all ascending or all descending, got {shown(levels)}")
    return plain


def metric_name(name: str, value: Any) -> str:
    """The name of a metric, as passed to `Controller.step`.

    Args:
        name: of the argument, for the error message.
        value: the name of the metric.

    Raises:
        ValueError: `value` is not a string, or is empty; the message names the argument and the value.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be the name of a metric, got {shown(value)}")
    return value


def names_of(name: str | None, usual: tuple[str, ...]) -> tuple[str, ...]:
    """The names that a metric may have: if it is "auto", the usual ones; none for None."""
    if name is None:
        return ()
    return usual if name == AUTO else (name,)


def chosen(names: tuple[str, ...], history: Sequence[Record]) -> str:
    """The first of these names that the first record has, otherwise the first name.

    Later records do not matter: if they did, a history that grows could be judged by another metric than before, and a
    level that never falls would fall.
    """
    return next((name for name in names if name in history[0].metrics), names[0])


def metric_of(record: Record, name: str, policy: object, instead: tuple[tuple[str, str], ...] = ()) -> float:
    """The value of a metric in a record.

    Args:
        instead: pairs of a part of a metric's name and a line to write, `{!r}` for its name, if the record has such a
            one, the best first.

    Raises:
        ValueError: the record lacks it; the message has the metric's name, the policy, the metrics that are there, and
            a line to write.
    """
    if name not in record.metrics:
        raise ValueError(
            f"metrics must contain {name!r}, which {type(policy).__name__} watches; got {sorted(record.metrics)}; "
            f"write {_line(record, name, instead)}"
        )
    return record.metrics[name]


def _line(record: Record, name: str, instead: tuple[tuple[str, str], ...]) -> str:
    # What was measured in training only if there is nothing else.
    there = sorted(record.metrics, key=lambda other: ("train" in other, other))
    for part, line in instead:
        for other in there:
            if part in other.lower():
                return line.format(other)
    return f"controller.step({{{name!r}: ...}})"


def _ascend(levels: tuple[float, ...]) -> bool:
    return all(a < b for a, b in zip(levels, levels[1:], strict=False))
