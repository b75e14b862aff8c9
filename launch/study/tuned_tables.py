"""Tables of methods at their best rates, and of the largest rates that train."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from scipy import stats

from common.markdown import DASH, markdown
from study.matrix import Measured
from study.methods import shown
from study.parts import BASELINE, LOST, TUNING, Largest, Runs, Tuned
from study.tasks import TASKS, WARM_UPS


class Compared(NamedTuple):
    """A method at its best rate beside uncompressed gradients at theirs, seed by seed.

    Attributes:
        task: at that rate.
        method: the best of those that the row may be.
        bits: a value, everything included.
        mean: of the differences, in points.
        error: of the mean, its standard error; NaN for one seed.
        bound: what the mean is above with 95 % confidence; NaN for one seed.
        lost: runs that ended more than `LOST` points below.
        seeds: how many there are.
    """

    task: str
    method: str
    bits: float
    mean: float
    error: float
    bound: float
    lost: int
    seeds: int


def fresh(part: Tuned, runs: Runs, row: str) -> dict[int, dict]:
    """The runs that compare a row, by seed."""
    return {key[2]: runs[key] for key in part.fresh(runs, (row,)) if key in runs}


def compared(part: Tuned, runs: Runs, row: str) -> Compared | None:
    """None as long as no seed has both."""
    best, own, base = part.best(runs, row), fresh(part, runs, row), fresh(part, runs, BASELINE)
    points = [run["score"] - base[seed]["score"] for seed, run in own.items() if seed in base]
    if best is None or not points:
        return None
    mean, error, seeds = Measured.of(points)
    bound = mean - float(stats.t.ppf(0.95, seeds - 1)) * error
    bits = statistics.mean(run["all_bits"] for run in own.values())
    return Compared(*best, bits, mean, error, bound, sum(point < -LOST for point in points), seeds)


def tuned(part: Tuned, runs: Runs) -> str:
    """Markdown: a row a method; those that have no fresh run are left out, and counted below."""
    rows = [cells for row in part.rows if (cells := _row(part, runs, row))]
    head = ("method", "as", "bits", "rate", "points", "95 % bound", f"under -{LOST:g}")
    choosing, seeds = part.tuning(part.rows), " and ".join(map(str, part.tuning_seeds))
    comparing = sum(len(fresh(part, runs, row)) for row in part.rows)
    note = (
        f"{sum(key in runs for key in choosing)} of {len(choosing)} runs that choose rates (seeds {seeds}), "
        f"{comparing} of {len(part.rows) * part.seeds} that compare: {part.seeds} per row; (n): only n; "
        f"—: the row's name; under -{LOST:g}: runs that ended more than {LOST:g} points below."
    )
    return f"{markdown(head, rows)}\n\n{note}" if rows else note


def _row(part: Tuned, runs: Runs, row: str) -> tuple[str, ...] | None:
    found = compared(part, runs, row)
    if found is None:
        return None
    row, name = shown(row), DASH if found.method == row else shown(found.method)
    rate = f"{TASKS[found.task].rate:g} (x{TASKS[found.task].rate / TASKS[part.task].rate:g})"
    if row == BASELINE:
        scores = Measured.of([run["score"] for run in fresh(part, runs, row).values()])
        return row, name, f"{found.bits:.2f}", rate, scores.shown(part.seeds, ".2f"), "", ""
    points = Measured(found.mean, found.error, found.seeds).shown(part.seeds, "+.2f")
    bound = f"{found.bound:+.2f}" if found.seeds > 1 else ""
    return row, name, f"{found.bits:.2f}", rate, points, bound, str(found.lost)


def largest(part: Largest, runs: Runs) -> str:
    """Markdown: a row for each task and warm-up, a column a method; as multiples of the task's rate."""
    rows = []
    for task in part.limits:
        for warm_up in WARM_UPS:
            cells = [_largest(part, runs, task, warm_up, method) for method in part.methods]
            if any(cell != DASH for cell in cells):
                rows.append((f"{task} ({TASKS[task].rate:g})", f"{warm_up:.0%}", *cells))
    note = f"{_tried(part)}."
    return f"{markdown(('task (its rate)', 'warm-up', *map(shown, part.methods)), rows)}\n\n{note}" if rows else note


def _largest(part: Largest, runs: Runs, task: str, warm_up: float, method: str) -> str:
    limits: Sequence[float] = part.limits[task]
    most = part.found(runs, task, warm_up, method)
    if most is None:
        return DASH
    if not most:
        return f"under x{limits[0]:g}"
    return f"x{most:g}" + (" or more" if most == limits[-1] else "")


def _tried(part: Largest) -> str:
    several = {", ".join(f"{rate:g}" for rate in rates) for rates in part.limits.values()}
    return f"{len(TUNING)} per cell and rate; tried: {' and '.join(sorted(several))} times the rate; —: runs missing"
