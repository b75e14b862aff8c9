"""Checks of arguments that several policies share: ladders of levels and names of metrics."""

from __future__ import annotations

from typing import Any

from hvd_dyncomp.checks import sequence, shown
from hvd_dyncomp.levels import check_level
from hvd_dyncomp.policies.base import Record


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


def metric_of(record: Record, name: str, policy: object) -> float:
    """The value of a metric in a record.

    Raises:
        ValueError: the record lacks it; the message has the metric's name, the policy and the metrics that are there.
    """
    if name not in record.metrics:
        raise ValueError(
            f"metrics must contain {name!r}, which {type(policy).__name__} watches; got {sorted(record.metrics)}"
        )
    return record.metrics[name]


def _ascend(levels: tuple[float, ...]) -> bool:
    return all(a < b for a, b in zip(levels, levels[1:], strict=False))
