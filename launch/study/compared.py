"""Runs beside uncompressed ones of the same seeds, and the study's tables of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from common.markdown import DASH, markdown
from study.methods import METHODS, NESTEROV, shown
from study.parts import BASELINE, LOST, TUNING, Largest, Part, Runs, Tuned
from study.tasks import TASKS, WARM_UPS

Seeds = Mapping[int, dict]


class Compared(NamedTuple):
    """Runs, each compared with an uncompressed one of its seed.

    Attributes:
        loss: mean difference of the test loss in %; below zero is better. NaN if a run diverged.
        error: its standard error; NaN for one run.
        points: mean difference of accuracy, in percentage points.
        bits: a value, everything included.
        runs: how many there are.
        diverged: those whose loss is not finite.
        lost: those that ended more than `LOST` points below.
    """

    loss: float
    error: float
    points: float
    bits: float
    runs: int
    diverged: int
    lost: int

    @classmethod
    def of(cls, own: Seeds, base: Seeds) -> Compared | None:
        """None as long as no seed has both."""
        pairs = [(run, base[seed]) for seed, run in own.items() if seed in base]
        if not pairs:
            return None
        losses = [100 * (run["loss"] / other["loss"] - 1) for run, other in pairs]
        points = [run["score"] - other["score"] for run, other in pairs]
        return cls(
            *_mean(losses),
            statistics.mean(points),
            statistics.mean(run["all_bits"] for run, _ in pairs),
            len(pairs),
            sum(not math.isfinite(loss) for loss in losses),
            sum(point < -LOST for point in points),
        )

    @property
    def shown(self) -> str:
        """The loss in a table."""
        if self.diverged:
            return f"diverged: {self.diverged} of {self.runs}"
        return f"{self.loss:+.2f}" + (f" ± {self.error:.2f}" if self.runs > 1 else "")


def _mean(numbers: list[float]) -> tuple[float, float]:
    """And its standard error; NaN for one number."""
    return statistics.mean(numbers), _error(numbers) if len(numbers) > 1 else math.nan


def _error(numbers: list[float]) -> float:
    return statistics.stdev(numbers) / math.sqrt(len(numbers)) if all(map(math.isfinite, numbers)) else math.nan


def chosen(runs: Runs, part: Part, task: str, method: str) -> dict[int, dict]:
    """The runs of one cell of a part, by seed."""
    return {seed: runs[key] for seed in part.seeds_used if (key := (task, method, seed)) in runs}


def of_part(part: Part, runs: Runs, task: str, method: str, base: str = BASELINE) -> Compared | None:
    """One cell of it, beside another method."""
    return Compared.of(chosen(runs, part, task, method), chosen(runs, part, task, base))


def base_of(method: str) -> str:
    """What tables compare it with: Nesterov's momentum gains without compression, too."""
    return NESTEROV[0].name if METHODS[method].nesterov and method != NESTEROV[0].name else BASELINE


def fresh(part: Tuned, runs: Runs, row: str) -> dict[int, dict]:
    """The runs that compare a row, by seed."""
    return {key[2]: runs[key] for key in part.fresh(runs, (row,)) if key in runs}


def of_tuned(part: Tuned, runs: Runs, row: str) -> Compared | None:
    """A row at its best rate, beside uncompressed gradients at theirs."""
    return Compared.of(fresh(part, runs, row), fresh(part, runs, BASELINE))


def tables(parts: Iterable[Part | Tuned | Largest], runs: Runs) -> dict[str, str]:
    """Markdown, by name."""
    by_kind = {Part: _part, Tuned: _tuned, Largest: _largest}
    return {part.name: by_kind[type(part)](part, runs) for part in parts}  # type: ignore[operator]


def _absolute(runs: Seeds) -> tuple[str, str]:
    """Of uncompressed runs: loss, and accuracy in %."""
    loss, error = _mean([run["loss"] for run in runs.values()])
    score = statistics.mean(run["score"] for run in runs.values())
    return f"{loss:.4g}" + (f" ± {error:.1g}" if len(runs) > 1 else ""), f"{score:.2f} %"


def _part(part: Part, runs: Runs) -> str:
    """A row a method, and of one task the columns of `_tuned`, of several a column each. Rows without any run are left
    out, and counted below.
    """
    alone = len(part.tasks) == 1
    rows: list[tuple[str, ...]] = []
    for method in part.methods:
        found = [_cells(part, runs, task, method) for task in part.tasks]
        if any(found):
            cells = (found[0] or ()) if alone else [_one_cell(part, cells) for cells in found]
            rows.append((shown(method), _bits(part, runs, method), *cells))
    there = sum(key in runs for key in part.keys)
    cell = "" if alone else f" Cells: test loss in % (points); ×n: only n runs, not {part.seeds}."
    note = f"{there} of {len(part.keys)} runs: {part.seeds} per {'row' if alone else 'cell'}.{cell}"
    if any(base_of(method) != BASELINE for method in part.methods):
        note += f" Rows of Nesterov's momentum are compared with *{NESTEROV[0].name}*, all others with *{BASELINE}*."
    head = ("method", "bits", *(("test loss, %", "points", "runs") if alone else part.tasks))
    return f"{markdown(head, rows)}\n\n{note}" if rows else note


def _cells(part: Part, runs: Runs, task: str, method: str) -> tuple[str, str, str] | None:
    own = chosen(runs, part, task, method)
    if method == BASELINE and own:
        return *_absolute(own), str(len(own))
    found = of_part(part, runs, task, method, base_of(method))
    return (found.shown, f"{found.points:+.2f}", str(found.runs)) if found else None


def _one_cell(part: Part, cells: tuple[str, str, str] | None) -> str:
    if cells is None:
        return DASH
    loss, points, number = cells
    few = f" ×{number}" if int(number) < part.seeds and not loss.startswith("diverged") else ""
    return f"{loss} ({points}){few}"


def _bits(part: Part, runs: Runs, method: str) -> str:
    """A value, all of them counted: from the least to the most of a task."""
    found = [run["all_bits"] for task in part.tasks for run in chosen(runs, part, task, method).values()]
    least, most = (f"{bits:.2f}" for bits in (min(found), max(found)))
    return least if least == most else f"{least} to {most}"


def _tuned(part: Tuned, runs: Runs) -> str:
    """A row a method; those that have no fresh run are left out, and counted below."""
    rows = [cells for row in part.rows if (cells := _tuned_row(part, runs, row))]
    head = ("method", "as", "bits", "rate", "test loss, %", "points", "runs", f"under -{LOST:g}")
    choosing, seeds = part.tuning(part.rows), " and ".join(map(str, part.tuning_seeds))
    comparing = sum(len(fresh(part, runs, row)) for row in part.rows)
    note = (
        f"{sum(key in runs for key in choosing)} of {len(choosing)} runs that choose rates (seeds {seeds}), "
        f"{comparing} of {len(part.rows) * part.seeds} that compare; "
        f"—: the row's name; under -{LOST:g}: runs that ended more than {LOST:g} points below."
    )
    return f"{markdown(head, rows)}\n\n{note}" if rows else note


def _tuned_row(part: Tuned, runs: Runs, row: str) -> tuple[str, ...] | None:
    best, found = part.best(runs, row), of_tuned(part, runs, row)
    if best is None or found is None:
        return None
    task, method = best
    rate = f"{TASKS[task].rate:g} (x{TASKS[task].rate / TASKS[part.task].rate:g})"
    about = shown(row), DASH if method == row else shown(method), f"{found.bits:.2f}", rate
    if row == BASELINE:
        return *about, *_absolute(fresh(part, runs, row)), str(found.runs), ""
    return *about, found.shown, f"{found.points:+.2f}", str(found.runs), str(found.lost)


def _largest(part: Largest, runs: Runs) -> str:
    """A row for each task and warm-up, a column a method; as multiples of the task's rate."""
    rows = []
    for task in part.limits:
        for warm_up in WARM_UPS:
            cells = [_most(part, runs, task, warm_up, method) for method in part.methods]
            if any(cell != DASH for cell in cells):
                rows.append((f"{task} ({TASKS[task].rate:g})", f"{warm_up:.0%}", *cells))
    several = {", ".join(f"{rate:g}" for rate in rates) for rates in part.limits.values()}
    tried = " and ".join(sorted(several))
    note = f"{len(TUNING)} runs per cell and rate; tried: {tried} times the rate; —: runs missing."
    return f"{markdown(('task (its rate)', 'warm-up', *map(shown, part.methods)), rows)}\n\n{note}" if rows else note


def _most(part: Largest, runs: Runs, task: str, warm_up: float, method: str) -> str:
    rates, most = part.limits[task], part.found(runs, task, warm_up, method)
    if most is None:
        return DASH
    return f"x{most:g}" + (" or more" if most == rates[-1] else "") if most else f"under x{rates[0]:g}"
