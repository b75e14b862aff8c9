"""The declared study's tables, and the pages that hold them between marks."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from common.markdown import DASH, markdown
from study.methods import shown
from study.parts import BASELINE, Part, Runs


class Measured(NamedTuple):
    """A number over seeds.

    Attributes:
        mean: of all of them.
        error: of the mean, its standard error; NaN for one seed.
        seeds: how many.
    """

    mean: float
    error: float
    seeds: int

    @classmethod
    def of(cls, numbers: list[float]) -> Measured:
        """Of at least one."""
        error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else math.nan
        return cls(statistics.mean(numbers), error, len(numbers))

    def shown(self, seeds: int, form: str) -> str:
        """In a table; ``seeds`` are as many as there should be."""
        text = format(self.mean, form) + (f" ± {self.error:.2f}" if self.seeds > 1 else "")
        return text + (f" ({self.seeds})" if self.seeds < seeds else "")


def chosen(runs: Runs, part: Part, task: str, method: str) -> dict[int, dict]:
    """The runs of one cell of a part, by seed."""
    keys = {seed: (task, method, seed) for seed in part.seeds_of(method)}
    return {seed: runs[key] for seed, key in keys.items() if key in runs}


def difference(runs: Runs, part: Part, task: str, method: str) -> Measured | None:
    """Of scores to those of uncompressed runs of the same seeds, in points; None where there are no pairs."""
    base = chosen(runs, part, task, BASELINE)
    own = chosen(runs, part, task, method)
    pairs = [run["score"] - base[seed]["score"] for seed, run in own.items() if seed in base]
    return Measured.of(pairs) if pairs else None


def table(part: Part, runs: Runs) -> str:
    """Markdown: a row a method, a column a task; rows without any run are left out, and counted below."""
    rows: list[tuple[str, ...]] = []
    for method in part.methods:
        cells = [_cell(part, runs, task, method) for task in part.tasks]
        if any(cell != DASH for cell in cells):
            rows.append((shown(method), _bits(part, runs, method), *cells))
    there = sum(key in runs for key in part.keys)
    note = f"{there} of {len(part.keys)} runs: {part.seeds} per cell; (n): only n."
    return f"{markdown(('method', 'bits', *part.tasks), rows)}\n\n{note}" if rows else note


def _cell(part: Part, runs: Runs, task: str, method: str) -> str:
    if method == BASELINE:
        scores = [run["score"] for run in chosen(runs, part, task, method).values()]
        return Measured.of(scores).shown(part.seeds, ".2f") if scores else DASH
    found = difference(runs, part, task, method)
    return found.shown(part.seeds, "+.2f") if found else DASH


def _bits(part: Part, runs: Runs, method: str) -> str:
    """A value, all of them counted: from the least to the most of a task."""
    found = [run["all_bits"] for task in part.tasks for run in chosen(runs, part, task, method).values()]
    least, most = (f"{bits:.2f}" for bits in (min(found), max(found)))
    return least if least == most else f"{least} to {most}"
