"""Fits the model's constants to measured steps: least squares of relative errors, no constant below zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from bench.cost_model import INTERFACE, UNITS, Machine, kernel_seconds, terms
from bench.cost_step import Step

_FACTORS = tuple(name for name in UNITS if name != INTERFACE)
# ns per byte: none, and from 0.05 to 2, each 8 % more than the one before.
_TRIED = (0.0, *np.geomspace(0.05, 2.0, 49))


class Point(NamedTuple):
    """One measured step.

    Attributes:
        label: layout, rate and method, for tables.
        seconds: the median of what it took.
    """

    label: tuple[str, str, str]
    step: Step
    machine: Machine
    seconds: float


class Fit(NamedTuple):
    """Attributes:
    constants: by the names and in the units of `model.UNITS`.
    errors: standard errors of them, as far as the points can tell; 0 for those at zero, and for "interface".
    """

    constants: dict[str, float]
    errors: dict[str, float]


def fit(points: Sequence[Point], nanoseconds: Mapping[str, float]) -> Fit:
    """The constants with which predicted and measured times differ least, relative to the measured ones.

    Args:
        points: at least as many as there are constants.
        nanoseconds: of the kernels, measured by themselves.
    """
    measured = np.array([point.seconds for point in points])
    known = np.array([p.machine.load * kernel_seconds(p.step.kernels, nanoseconds) for p in points])
    rest = (measured - known) / measured
    best: tuple[float, float, NDArray, NDArray] | None = None
    for interface in _TRIED:
        rows = [terms(point.step, point.machine, interface) for point in points]
        matrix = np.array([[row[name] for name in _FACTORS] for row in rows]) / measured[:, None]
        found, norm = nnls(matrix, rest)
        left = float(norm) ** 2
        if best is None or left < best[0]:
            best = left, interface, found, matrix
    left, interface, found, matrix = best  # type: ignore[misc]  # something has been tried
    spread = _standard_errors(matrix, found, left)
    constants = dict(zip(_FACTORS, map(float, found), strict=True)) | {INTERFACE: float(interface)}
    return Fit(constants, dict(zip(_FACTORS, map(float, spread), strict=True)) | {INTERFACE: 0.0})


def untold(points: Sequence[Point]) -> list[str]:
    """The constants that none of these steps has to do with."""
    rows = [terms(point.step, point.machine, 0.0) for point in points]
    return [name for name in _FACTORS if not any(row[name] for row in rows)]


def _standard_errors(matrix: NDArray, found: NDArray, left: float) -> NDArray:
    free = found > 0
    variance = left / max(1, len(matrix) - int(free.sum()))
    errors = np.zeros_like(found)
    scale = np.linalg.norm(matrix[:, free], axis=0)
    scaled = matrix[:, free] / scale
    errors[free] = np.sqrt(variance * np.diag(np.linalg.pinv(scaled.T @ scaled))) / scale
    return errors
