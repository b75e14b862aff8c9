"""The study that the package's default comes from: which runs make up each table and figure of the study."""

from __future__ import annotations

from collections.abc import Iterable

from study.methods import (
    FP16,
    HALF_AS_FAST,
    LESS,
    LESS_UNCOMPRESSED,
    MORE_BEFORE_FEW,
    MORE_FIRST,
    NESTEROV,
    POWERSGD,
    RIVALS,
    WHOLE,
    Method,
)
from study.parts import BASELINE, FRESH, TUNING, Largest, Part, Tuned
from study.record import Key
from study.tasks import FEW_RATES, LARGE_RATES, LIMITS, varied


def _names(methods: Iterable[Method]) -> tuple[str, ...]:
    return tuple(method.name for method in methods)


_4_TO_2, _QUARTER = _names(WHOLE[2:5]), LESS[2].name
_SGD, _CLIPPED, _ADAMW = "text, sgd, short", "text, sgd, short, clipped", "text, adamw, short"
_RESNET8, _REGRESSION, _BATCH = "resnet8, short", "regression, rate 0.05", "text, sgd, short, batch x4, clipped"

# What each level costs as most people train, and whether more bits in the first steps make it less. 8 bits show how far
# trainings part that differ by next to nothing.
RECIPE = Part(
    "recipe",
    ("recipe, text",),
    (
        *(BASELINE, FP16.name, *_names((*WHOLE[:3], *MORE_FIRST, *WHOLE[3:5], *LESS[:3], MORE_BEFORE_FEW))),
        *(POWERSGD.name, RIVALS["PowerSGD rank 4"][1].name),
    ),
    seeds=6,
)
RECIPE_ELSEWHERE = Part(
    "recipe, other tasks",
    ("recipe, text, 4,000 steps", "recipe, text, momentum 0.7", "recipe, resnet8, x4"),
    (BASELINE, *_names((WHOLE[2], MORE_FIRST[0], MORE_FIRST[2], WHOLE[3]))),
    seeds=6,
)

# The optimizer's whole momentum, which is Nesterov's, at few bits, as most people train: of AdamW NAdam's.
_FEW_WITH_NESTEROV = _names((NESTEROV[0], *NESTEROV[-3:]))  # uncompressed, 1, 0.5, 0.25 bit
NESTEROV_IN_RECIPE = Part("Nesterov, recipe", RECIPE.tasks, (BASELINE, *_names(NESTEROV)), seeds=6)
NESTEROV_ON_IMAGES = Part("Nesterov, images", RECIPE_ELSEWHERE.tasks[-1:], (BASELINE, *_FEW_WITH_NESTEROV), seeds=6)
NESTEROV_OF_FOUR = Part(
    "Nesterov, 4 workers", ("recipe, text, 4 workers",), (BASELINE, _4_TO_2[0], _4_TO_2[2], *_FEW_WITH_NESTEROV)
)
# Does what 4 bits cost grow with the model?
RECIPE_LARGER = Part(
    "recipe, 1 million",
    ("recipe, text, 1 million",),
    (BASELINE, _4_TO_2[0], MORE_FIRST[2].name, *_FEW_WITH_NESTEROV[:-1]),
)

# The usual momentum, less of it, and Nesterov's; each task at the rate that is best uncompressed (unclipped text: at
# twice that; the regression: at the largest that trains).
WITH_NESTEROV = Part(
    "momentum",
    (
        *(varied(_SGD, 2), varied(_CLIPPED, 2), varied(_ADAMW, 2)),
        *(varied(_RESNET8, 4), varied(_REGRESSION, 2), varied(_BATCH, 4)),
    ),
    (BASELINE, *_4_TO_2, *_names((*NESTEROV, LESS_UNCOMPRESSED[1], *LESS[:3]))),
    seed=FRESH,
)

# Each method at its best rate, rivals with what we give ourselves.
_ROWS = {
    **{name: (name,) for name in (BASELINE, LESS_UNCOMPRESSED[0].name, _QUARTER, HALF_AS_FAST.name, LESS[3].name)},
    **{name: _names(some) for name, some in RIVALS.items()},
    FP16.name: (FP16.name,),
}


def _rows(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: _ROWS[name] for name in names}


# Of AdamW's rate a factor is nothing but another rate.
_ON_ADAMW = {name: tuple(one for one in some if "c = " not in one) for name, some in _ROWS.items()}
_RANKS = ("PowerSGD rank 1", "PowerSGD rank 4")
_FEW = (BASELINE, _QUARTER, LESS[3].name, *_RANKS)
TUNED_REGRESSION = Tuned(
    "tuned, regression", _REGRESSION, {name: some for name, some in _ROWS.items() if name != FP16.name}, 50
)
TUNED_TEXT = Tuned("tuned, text, sgd", _SGD, _ROWS, 12)
TUNED_MLP = Tuned("tuned, mlp", "mlp", _rows(*_FEW), 6)
TUNED_RESNET = Tuned("tuned, resnet8", _RESNET8, _rows(*_FEW, FP16.name), 6)
TUNED_ADAMW = Tuned("tuned, text, adamw", _ADAMW, {name: _ON_ADAMW[name] for name in _FEW}, 12)
# One of twelve runs at 1/4 bit ended 7 points below: twice as many more say how rare that is. These residuals are
# bfloat16, those of the twelve were float32; what was chosen stays.
TUNED_AGAIN = Tuned("tuned, text, sgd, again", _SGD, _rows(BASELINE, _QUARTER, HALF_AS_FAST.name), 24, seed=30)
# A run of 1/4 bit that was lost began with a gradient ten times as large as the others. Are any lost with clipping?
TUNED_CLIPPED = Tuned("tuned, text, sgd, clipped", _CLIPPED, _rows(BASELINE, _QUARTER, *_RANKS, FP16.name), 12)
CLIPPED_AGAIN = Tuned("tuned, text, sgd, clipped, again", _CLIPPED, _rows(BASELINE, _QUARTER), 24, seed=30)
# Is a large batch worse at 1/4 bit, or only at this rate?
TUNED_BATCH = Tuned("tuned, large batch", _BATCH, _rows(BASELINE, _QUARTER, _RANKS[1], LESS_UNCOMPRESSED[0].name), 6)
# A training of a quarter of an hour: one seed chooses the rate.
LARGE = Tuned(
    "tuned, 10 million",
    "text, adamw, 10 million",
    {name: _ON_ADAMW[name] for name in (BASELINE, _QUARTER, _RANKS[1], FP16.name)},
    3,
    seed=0,
    rates=LARGE_RATES,
    tuning_seeds=TUNING[:1],
)
# Do few bits stand a batch that grows with the workers?
GROWING = tuple(
    Tuned(
        f"tuned, {n} workers", f"resnet8, {n} workers, batch x{n // 4}", _rows(BASELINE, _QUARTER), 3, rates=FEW_RATES
    )
    for n in (8, 16)
)
LARGEST = Largest("largest rates", (BASELINE, _QUARTER, HALF_AS_FAST.name), LIMITS)

# What 1/4 bit needs, at the task's own rate.
MOMENTUM_KEPT = Part(
    "0.25 bit with momentum", ("mlp", _RESNET8, _SGD, _ADAMW), (BASELINE, WHOLE[5].name, *_names(LESS[2:]))
)
BREADTH = Part(
    "breadth",
    ("text, adamw, short, decay 0.1", "text, sgd, short, batch x4", _BATCH),
    (BASELINE, *_names(LESS[2:]), RIVALS["PowerSGD rank 4"][1].name),
)
MORE_WORKERS = Part(
    "more workers",
    (_RESNET8, *(f"resnet8, {n} workers" for n in (4, 8, 16))),
    (BASELINE, *_names(LESS[2:])),
)
# Eleven million values: a quarter of an hour, too.
RESNET18 = Part("resnet18", ("resnet18, 4 workers",), (BASELINE, _QUARTER), seed=TUNING[0])
# Is it that 0.9 is more momentum than is best, compressed or not?
LARGE_MOMENTUM = Part("10 million, momentum", (LARGE.task,), (BASELINE, LESS_UNCOMPRESSED[1].name, _QUARTER))
# Unclipped gradients and hardly a warm-up, by the seeds of the largest rates.
SHORT_WARM_UPS = Part(
    "short warm-ups",
    tuple(varied(_SGD, 1, warm_up) for warm_up in (0.02, 0.1)),
    (BASELINE, *_4_TO_2[:2], _QUARTER),
    seeds=len(TUNING),
    seed=TUNING[0],
)

PARTS: tuple[Part | Tuned | Largest, ...] = (
    *(RECIPE, RECIPE_ELSEWHERE, NESTEROV_IN_RECIPE, NESTEROV_ON_IMAGES, NESTEROV_OF_FOUR, RECIPE_LARGER, WITH_NESTEROV),
    *(TUNED_RESNET, TUNED_CLIPPED, CLIPPED_AGAIN, TUNED_ADAMW, LARGE, TUNED_BATCH),
    *(TUNED_TEXT, TUNED_AGAIN, TUNED_REGRESSION, TUNED_MLP, *GROWING),
    LARGEST,
    *(MOMENTUM_KEPT, BREADTH, MORE_WORKERS, RESNET18, LARGE_MOMENTUM, SHORT_WARM_UPS),
)

# What figures show, by title: a task and the tables whose methods they show in it; and tables.
DRAWN = {
    "text, AdamW, clipped, warm-up over 3 %": (RECIPE.tasks[0], (RECIPE, NESTEROV_IN_RECIPE)),
    "ResNet-8, SGD, warm-up over 5 %": (RECIPE_ELSEWHERE.tasks[2], (RECIPE_ELSEWHERE, NESTEROV_ON_IMAGES)),
}
DRAWN_AT_BEST_RATES = {"ResNet-8, SGD": TUNED_RESNET, "text, AdamW": TUNED_ADAMW}

# Whatever takes a few minutes on two cores.
QUICK = (
    Part(
        "quick",
        ("mlp", _RESNET8),
        (BASELINE, FP16.name, *_4_TO_2, *_names((NESTEROV[4], *LESS[2:])), _ROWS["PowerSGD rank 4"][1]),
        seeds=1,
    ),
)


def keys(parts: Iterable[Part | Tuned | Largest]) -> list[Key]:
    """The runs of several parts that may be wanted, each once, in their order."""
    return list(dict.fromkeys(key for part in parts for key in part.keys))
