"""What a table of the study is made of: which runs it wants, given those that are there."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from study.methods import RECORDED
from study.record import Key
from study.tasks import RATES, WARM_UPS, varied

BASELINE = "uncompressed"

Runs = Mapping[Key, dict]

# Seeds with which rates are chosen, and with which nothing is compared; and the first of those that compare.
TUNING, FRESH = (100, 101), 10

LOST = 5.0  # points: a training that ends so far below is lost


def trainable(keys: Iterable[Key]) -> list[Key]:
    """Those whose method can still be trained."""
    return [key for key in keys if key[1] not in RECORDED]


@dataclass(frozen=True)
class Part:
    """One table; its runs are all pairs of tasks and methods, with as many seeds.

    Attributes:
        name: of the marks between which the table stands in a page.
        tasks, methods: columns and rows; keys of `study.tasks.TASKS` and of `study.methods.METHODS`,
            or among its `RECORDED`.
        seeds: runs of each pair.
        once: the methods of which one run is enough: nothing is concluded from them.
        seed: the first one.
    """

    name: str
    tasks: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int = 3
    once: tuple[str, ...] = ()
    seed: int = 0

    def seeds_of(self, method: str) -> range:
        """Of its runs, in each task."""
        return range(self.seed, self.seed + (1 if method in self.once else self.seeds))

    @property
    def keys(self) -> list[Key]:
        """All runs."""
        pairs = itertools.product(self.tasks, self.methods)
        return [(task, method, seed) for task, method in pairs for seed in self.seeds_of(method)]

    def wanted(self, runs: Runs) -> list[Key]:
        """Those that it is known to need, and that can be trained."""
        return trainable(self.keys)


@dataclass(frozen=True)
class Tuned:
    """A table of one task in which each method is at its best rate. The rate, and the best of several ways to be
    that method, are those of the highest mean score over `TUNING`; what is compared are fresh runs.

    Attributes:
        name: of the marks in a page.
        task: at all `RATES`.
        rows: by name, what a method may be.
        seeds: fresh ones.
        first: groups of rows that are trained before the others, as most is decided by them.
        seed: the first of the fresh ones.
    """

    name: str
    task: str
    rows: Mapping[str, tuple[str, ...]]
    seeds: int
    first: tuple[tuple[str, ...], ...] = ()
    seed: int = FRESH

    @property
    def tasks(self) -> tuple[str, ...]:
        """The task at all rates."""
        return tuple(varied(self.task, rate) for rate in RATES)

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
        return list(itertools.product(self.tasks, self.methods, (*TUNING, *self.seeds_fresh)))

    def tuning(self, rows: Iterable[str]) -> list[Key]:
        """The runs that say at which rate these rows are, and as what."""
        methods = dict.fromkeys(method for row in rows for method in self.rows[row])
        return list(itertools.product(self.tasks, methods, TUNING))

    def best(self, runs: Runs, row: str) -> tuple[str, str] | None:
        """The task at the best rate, and the method that is best; None as long as a run is missing."""
        keys = self.tuning((row,))
        if any(key not in runs for key in keys):
            return None
        pairs = dict.fromkeys((task, method) for task, method, _ in keys)
        return max(pairs, key=lambda pair: statistics.mean(runs[*pair, seed]["score"] for seed in TUNING))

    def fresh(self, runs: Runs, rows: Iterable[str]) -> list[Key]:
        """The runs that compare them, of those rows of which the best is known."""
        found = [best for row in rows if (best := self.best(runs, row))]
        return [(*best, seed) for seed in self.seeds_fresh for best in found]

    def wanted(self, runs: Runs) -> list[Key]:
        """Those that it is known to need: of a group of rows, and when they are all there, of the next."""
        early = {row for group in self.first for row in group}
        keys: list[Key] = []
        for group in (*self.first, tuple(row for row in self.rows if row not in early)):
            for more in map(trainable, (self.tuning(group), self.fresh(runs, group))):
                keys += more
                if any(key not in runs for key in more):
                    return keys
        return keys


@dataclass(frozen=True)
class Largest:
    """The table of the largest rates that train: not more than `LOST` points below uncompressed gradients at the task's
    own rate. Rates go up until one is lost, or down until one is not; the seeds are those that rates are chosen with.

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

    def found(self, runs: Runs, task: str, warm_up: float, method: str) -> tuple[float | None, list[Key]]:
        """The largest rate that trains (0: none of them; None: not known yet), and the runs that say so."""
        base = [(task, BASELINE, seed) for seed in TUNING]
        needed = list(base)

        def trains(rate: float) -> bool | None:
            own = [(varied(task, rate, warm_up), method, seed) for seed in TUNING]
            needed.extend(own)
            if any(key not in runs for key in needed):
                return None
            return all(runs[one]["score"] >= runs[other]["score"] - LOST for one, other in zip(own, base, strict=True))

        most, answer = 0.0, None
        for rate in (rate for rate in self.limits[task] if rate >= 1):
            answer = trains(rate)
            if not answer:
                break
            most = rate
        if most or answer is None:
            return (None if answer is None else most), needed
        for rate in (rate for rate in reversed(self.limits[task]) if rate < 1):
            answer = trains(rate)
            if answer is not False:
                return (rate if answer else None), needed
        return 0.0, needed

    def wanted(self, runs: Runs) -> list[Key]:
        """Those that it is known to need."""
        keys: dict[Key, None] = {}
        for task in self.limits:
            cells = itertools.product(WARM_UPS, self.methods)
            keys |= dict.fromkeys(key for cell in cells for key in self.found(runs, task, *cell)[1])
            if any(key not in runs for key in keys):
                break  # one task after the other, so that a study that is cut off has whole ones
        return list(keys)
