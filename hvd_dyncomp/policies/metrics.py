"""The metrics of an epoch: those of all ranks as one, and which of them are not finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any


def not_finite(metrics: Mapping[str, float]) -> list[str]:
    """Names of metrics that are NaN or infinite, sorted."""
    return sorted(key for key, value in metrics.items() if not math.isfinite(value))


def of_all_ranks(reports: list[dict[str, Any]], least: Collection[str]) -> dict[str, float]:
    """The weighted means, and of some metrics the least value of all ranks."""
    found = weighted_means(reports)
    for key in found:
        if key in least:
            every = [report["metrics"][key] for report in reports]
            found[key] = math.nan if any(map(math.isnan, every)) else min(every)
    return found


def weighted_means(reports: list[dict[str, Any]]) -> dict[str, float]:
    """Sample-weighted means over the ranks, by sorted name. Each mean lies between its values."""
    # A rank without samples may have NaN as its metrics; 0 * NaN must not spoil the others'.
    used = [report for report in reports if report["weight"] > 0]
    # Scaled by a power of two, which changes no digit: weights near the largest float would sum to infinity.
    exponent = math.frexp(max(report["weight"] for report in used))[1]
    weights = [math.ldexp(report["weight"], -exponent) for report in used]
    means = {}
    for key in reports[0]["metrics"]:
        values = [report["metrics"][key] for report in used]
        mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
        # If all ranks have 0.7, the mean reaches a threshold of 0.7, whatever was rounded. (A NaN passes both.)
        means[key] = min(max(mean, min(values)), max(values))
    return means
