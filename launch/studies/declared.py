"""The study that the package's default comes from: which runs make up each table and figure of docs/study.md."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from screening.results import Key
from screening.tasks import TASKS


@dataclass(frozen=True)
class Part:
    """One table; its runs are all pairs of tasks and contenders, with as many seeds.

    Attributes:
        name: of the marks between which the table stands in a page.
        tasks, contenders: columns and rows; keys of `screening.tasks.TASKS` and `screening.contenders.CONTENDERS`.
        seeds: runs of each pair, from seed 0 on.
        once: the contenders of which one run is enough: nothing is concluded from them.
    """

    name: str
    tasks: tuple[str, ...]
    contenders: tuple[str, ...]
    seeds: int = 3
    once: tuple[str, ...] = ()

    def seeds_of(self, contender: str) -> range:
        """Of its runs, in each task."""
        return range(1 if contender in self.once else self.seeds)

    @property
    def keys(self) -> list[Key]:
        """All runs."""
        pairs = itertools.product(self.tasks, self.contenders)
        return [(task, contender, seed) for task, contender in pairs for seed in self.seeds_of(contender)]


# In a few hundred steps losses show; the others are there to see what longer trainings and larger models make of them.
SHORT = ("mlp", "resnet8, short", "text, sgd, short", "text, adamw, short")

TASKS_OF_RATES = tuple(task for task in TASKS if task.startswith("regression"))

# What README.md shows of it; with the largest rate that a training stands.
README = Part(
    "training",
    (*SHORT, TASKS_OF_RATES[-1]),
    (
        *("uncompressed", "fp16", "4", "1", "1/4", "1/8", "1/4, momentum kept"),
        *("ladder 4-8-16", "ladder 4-1/4", "PowerSGD rank 1"),
    ),
)

# What longer trainings make of it.
LONGER = Part("longer", ("resnet8", "resnet20", "resnet8, 28x28"), ("uncompressed", "4", "1", "1/4", "1/8"), seeds=2)
LONGER_TEXT = Part("longer, text", ("text, sgd", "text, adamw"), LONGER.contenders, seeds=1)

_OTHERS = (
    *("8", "2", "1/2"),
    *("ladder 1-2-4", "ladder 1/8-1/4-1/2-1", "ladder 1-1/2-1/4-1/8"),
    *("PowerSGD rank 4", "top-k 1/4"),
)
MAIN = Part(
    "main",
    SHORT,
    (
        *("uncompressed", "fp16", "8", "4", "2", "1", "1/2", "1/4", "1/8"),
        *("1/4 error", "1/4, momentum kept"),
        *("ladder 4-8-16", "ladder 4-1/4", "ladder 1-2-4", "ladder 1/8-1/4-1/2-1", "ladder 1-1/2-1/4-1/8"),
        *("PowerSGD rank 1", "PowerSGD rank 4", "top-k 1/4"),
    ),
    once=_OTHERS,
)

# How much of the optimizer's momentum does how much good and harm.
_LESS = (
    *("2", "2, momentum kept", "1, momentum kept", "1, momentum 0.7", "1, momentum 0.5"),
    *("1/4, momentum 0.7", "1/4, momentum 0.5"),
)
MOMENTUM = Part(
    "momentum",
    SHORT,
    (
        *("uncompressed", "uncompressed, no momentum", "4", "4, no momentum", "2, momentum kept", "2"),
        *("1, momentum kept", "1, momentum 0.7", "1, momentum 0.5", "1"),
        *("1/4, momentum kept", "1/4, momentum 0.7", "1/4, momentum 0.5", "1/4", "1/8"),
    ),
    once=("uncompressed, no momentum", "4, no momentum", *_LESS),
)
# Where a rate is the largest that a training stands.
RATES = Part("rates", TASKS_OF_RATES, (*README.contenders, *_LESS))

WORKERS = Part(
    "workers",
    ("resnet8, 8 workers",),
    (
        *("uncompressed", "8, scale per tensor", "4", "1/4, momentum kept", "1/4"),
        *("1/4, feedback of workers", "1/4, no feedback"),
    ),
    seeds=1,
)

FEEDBACK = Part(
    "feedback",
    ("mlp, 4 workers",),
    (
        *("uncompressed", "8, scale per tensor"),
        *("8", "8, feedback of workers", "8, no feedback"),
        *("4", "4, feedback of workers", "4, no feedback"),
        *("1/4", "1/4, feedback of workers", "1/4, no feedback"),
    ),
    seeds=2,
)

ORDER = Part(
    "order",
    ("mlp", "resnet8, short", TASKS_OF_RATES[1]),
    (
        *("uncompressed", "ladder 1-2-4", "ladder 4-1-2"),
        *("ladder 1/8-1/4-1/2-1", "ladder 1-1/2-1/4-1/8", "ladder 1/2-1/8-1-1/4", "1/2"),
    ),
    seeds=1,
)

# They see a thousand images, or text, that are neither trained with nor tested on.
_STEERED = ("plateau 1/8-1/2", "critical 1/8-1", "critical 1/8-2")
POLICIES = Part(
    "policies",
    ("mlp", "resnet8, short"),
    ("uncompressed", "1/8", "1/4", *_STEERED, "step 1/8-1/4-1/2", "step down 1-1/4-1/8"),
)
_ON_TEXT = (*_STEERED, "step 1/8-1/4-1/2, text", "step down 1-1/4-1/8, text")
POLICIES_ON_TEXT = Part(
    "policies, text", ("text, sgd, short",), ("uncompressed", "1/8", "1/4", *_ON_TEXT), once=_ON_TEXT
)

PARTS = (
    *(README, LONGER, LONGER_TEXT, MAIN, MOMENTUM, RATES, WORKERS, FEEDBACK, ORDER),
    *(POLICIES, POLICIES_ON_TEXT),
)

# Whatever of the main table takes a few minutes on two cores.
QUICK = (Part("main", ("mlp", "resnet8, short"), MAIN.contenders, seeds=1),)


def keys(parts: Iterable[Part]) -> list[Key]:
    """The runs of several parts, each once, in their order."""
    return list(dict.fromkeys(key for part in parts for key in part.keys))
