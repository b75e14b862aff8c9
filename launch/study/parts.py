"""What a table of the study is made of: which runs it wants, given those that are there."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from study.record import Key
from study.tasks import RATES, WARM_UPS, varied

BASELINE = "uncompressed"

Runs = Mapping[Key, dict]

# Seeds with which rates are chosen, and with which nothing is compared; and the first of those that compare.
TUNING, FRESH = (100, 101), 10

LOST = 5.0  # points: a training that ends so far below is lost


@dataclass(frozen=True)
class Part:
    """One table; its runs are all pairs of tasks and methods, with as many seeds.

    Attributes:
        name: of the marks between which the table stands in a page.
        tasks, methods: columns and rows; keys of `study.tasks.TASKS` and of `study.methods.METHODS`.
        seeds: runs of each pair.
        seed: the first one.
    """

    name: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int = 3
    seed: int = 0

    @property
    def seeds_used(self) -> range:
        """Of the runs of each pair."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def keys(self) -> list[Key]:
        """All runs."""
        return list(itertools.product(self.tasks, self.methods, self.seeds_used))

    def wanted(self, runs: Runs) -> list[Key]:
        """All of them."""
        return self.keys


@dataclass(frozen=True)
class Tuned:
    """A table of one task in which each method is at its best rate. The rate, and the best of several ways to be
    that method, are those of the highest mean score over some seeds; what is compared are fresh runs.

    Attributes:
        name: of the marks in a page.
        task: at all `rates`.
        rows: by name, what a method may be.
        seeds: fresh ones.
        seed: the first of the fresh ones.
        rates: as multiples of the task's own.
        tuning_seeds: with which rates are chosen.
    """

    name: str
    task: str
    rows: Mapping[str, tuple[str, ...]]
    seeds: int
    seed: int = FRESH
    rates: tuple[float, ...] = RATES
    tuning_seeds: tuple[int, ...] = TUNING

    @property
    def tasks(self) -> tuple[str, ...]:
        """The task at all rates."""
        return tuple(varied(self.task, rate) for rate in self.rates)

    @property
    def methods(self) -> tuple[str, ...]:
        """All that a row may be."""
        return tuple(dict.fromkeys(method for choices in self.rows.values() for method in choices))

    @property
    def seeds_fresh(self) -> range:
        """With which methods are compared."""
        return range(self.seed, self.seed + self.seeds)

    @property
    def keys(self) -> list[Key]:
        """All runs that may come to be wanted."""
        return list(itertools.product(self.tasks, self.methods, (*self.tuning_seeds, *self.seeds_fresh)))

    def tuning(self, rows: Iterable[str]) -> list[Key]:
        """The runs that say at which rate these rows are, and as what."""
        methods = dict.fromkeys(method for row in rows for method in self.rows[row])
        return list(itertools.product(self.tasks, methods, self.tuning_seeds))

    def best(self, runs: Runs, row: str) -> tuple[str, str] | None:
        """The task at the best rate, and the method that is best; None as long as a run is missing."""
        keys = self.tuning((row,))
        if any(key not in runs for key in keys):
            return None
        pairs = dict.fromkeys((task, method) for task, method, _ in keys)
        return max(pairs, key=lambda pair: statistics.mean(runs[*pair, seed]["score"] for seed in self.tuning_seeds))

    def fresh(self, runs: Runs, rows: Iterable[str]) -> list[Key]:
        """The runs that compare them, of those rows of which the best is known."""
        found = [best for row in rows if (best := self.best(runs, row))]
        return [(*best, seed) for seed in self.seeds_fresh for best in found]

    def wanted(self, runs: Runs) -> list[Key]:
        """Those that it is known to need: when a row's best rate is known, the runs that compare it."""
        return [*self.tuning(self.rows), *self.fresh(runs, self.rows)]


@dataclass(frozen=True)
class Largest:
    """The table of the largest rates that train: not more than `LOST` points below uncompressed gradients at the task's
    own rate. Rates went up until one was lost, or down until one was not; the seeds are those that rates are chosen
    with. No more runs are made for it.

    Attributes:
        name: of the marks in a page.
        methods: columns.
        limits: by task, the rates that are tried, as multiples of its own.
    """

    name: str
    methods: tuple[str, ...]
    limits: Mapping[str, Sequence[float]]

    @property
    def tasks(self) -> tuple[str, ...]:
        """With all rates and warm-ups."""
        return tuple(varied(t, *own) for t in self.limits for own in itertools.product(self.limits[t], WARM_UPS))

    @property
    def keys(self) -> list[Key]:
        """All runs that may come to be wanted."""
        return list(itertools.product(self.tasks, self.methods, TUNING))

    def found(self, runs: Runs, task: str, warm_up: float, method: str) -> float | None:
        """The largest rate that trains; 0: none of them; None: there are no runs."""

        def trains(rate: float) -> bool:
            pairs = [((varied(task, rate, warm_up), method, seed), (task, BASELINE, seed)) for seed in TUNING]
            return all(own in runs and runs[own]["score"] >= runs[base]["score"] - LOST for own, base in pairs)

        if (varied(task, 1, warm_up), method, TUNING[0]) not in runs:
            return None
        rates = self.limits[task]
        up = list(itertools.takewhile(trains, (rate for rate in rates if rate >= 1)))
        return up[-1] if up else next((rate for rate in reversed(rates) if rate < 1 and trains(rate)), 0.0)

    def wanted(self, runs: Runs) -> list[Key]:
        """None."""
        return []
