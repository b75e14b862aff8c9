"""The declared study's tables, and the pages that hold them between marks."""

from __future__ import annotations

import math
import statistics
from typing import NamedTuple

from common import markdown
from study.methods import shown
from study.parts import BASELINE, Part, Runs

_DASH = "—"


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
        if any(cell != _DASH for cell in cells):
            rows.append((shown(method), _bits(part, runs, method), *cells))
    there = sum(key in runs for key in part.keys)
    note = f"{there} of {len(part.keys)} runs: {part.seeds} per cell; (n): only n."
    return f"{markdown.markdown(('method', 'bits', *part.tasks), rows)}\n\n{note}" if rows else note


def _cell(part: Part, runs: Runs, task: str, method: str) -> str:
    if method == BASELINE:
        scores = [run["score"] for run in chosen(runs, part, task, method).values()]
        return _text(Measured.of(scores), part, ".2f") if scores else _DASH
    found = difference(runs, part, task, method)
    return _text(found, part, "+.2f") if found else _DASH


def _text(found: Measured, part: Part, form: str) -> str:
    text = format(found.mean, form)
    if found.seeds > 1:
        text += f" ± {found.error:.2f}"
    return text + (f" ({found.seeds})" if found.seeds < part.seeds else "")


def _bits(part: Part, runs: Runs, method: str) -> str:
    """A value, all of them counted: from the least to the most of a task."""
    found = [run["all_bits"] for task in part.tasks for run in chosen(runs, part, task, method).values()]
    least, most = (f"{bits:.2f}" for bits in (min(found), max(found)))
    return least if least == most else f"{least} to {most}"
