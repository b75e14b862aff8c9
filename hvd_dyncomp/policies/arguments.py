"""What several policies are told, checked: ladders of levels, and names of metrics; and the metrics of an epoch."""

from __future__ import annotations

from typing import Any

from hvd_dyncomp.checks import sequence, shown
from hvd_dyncomp.levels import check_level
from hvd_dyncomp.policies.base import Record


def ascending_levels(levels: Any) -> tuple[float, ...]:
    """One or more levels, each with more bits than the one before.

    Raises:
        ValueError, TypeError: they are something else; the message names `levels` and the value.
    """
    plain = tuple(check_level("levels", bits) for bits in sequence("levels", levels))
    if not plain or not _ascend(plain):
        raise ValueError(f"levels must be one or more ascending levels, got {shown(levels)}")
    return plain


def one_way_levels(levels: Any) -> tuple[float, ...]:
    """One or more levels that ascend or descend.

    Raises:
        ValueError, TypeError: they are something else; the message names `levels` and the value.
    """
    plain = tuple(check_level("levels", bits) for bits in sequence("levels", levels))
    if not plain or not (_ascend(plain) or _ascend(plain[::-1])):
        raise ValueError(f"levels must be one or more levels, all ascending or all descending, got {shown(levels)}")
    return plain


def metric_name(name: str, value: Any) -> str:
    """The name of a metric, under which `Controller.step` is handed it.

    Raises:
        ValueError: it is no string, or empty; the message names the argument `name` and the value.
    """
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name} must be the name of a metric, got {shown(value)}")
    return value


def metric_of(record: Record, name: str, policy: object) -> float:
    """What an epoch's metrics have under a name.

    Raises:
        ValueError: nothing; the message has the name, who watches it and what there is.
    """
    if name not in record.metrics:
        raise ValueError(
            f"metrics must contain {name!r}, which {type(policy).__name__} watches; got {sorted(record.metrics)}"
        )
    return record.metrics[name]


def _ascend(levels: tuple[float, ...]) -> bool:
    return all(a < b for a, b in zip(levels, levels[1:], strict=False))
