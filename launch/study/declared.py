"""The study that the package's default comes from: which runs make up each table and figure of the study."""

from __future__ import annotations

from collections.abc import Iterable

from study.methods import (
    AGAINST_RATE,
    BY_RATE,
    FEEDBACK,
    FINER,
    FINER_FIRST,
    FINER_LESS,
    FIRST_STEPS,
    FOUR_CODES,
    FOUR_CODES_NESTEROV,
    MORE_FIRST,
    NESTEROV,
    NESTEROV_BEFORE,
    NOT_CLIPPED,
    NOT_CLIPPED_LESS,
    POLICIES,
    QSGD,
    RECORDED,
    RECORDED_RIVALS,
    RIVALS,
    STEPS,
    STEPS_ON_TEXT,
    WIDER,
)
from study.parts import FRESH, TUNING, Largest, Part, Tuned
from study.record import Key
from study.tasks import FEW_RATES, LARGE_RATES, LIMITS, RECIPE_RATES, REGRESSION_RATES, varied

# In a few hundred steps losses show; the others are there to see what longer trainings and larger models make of them.
SHORT = ("mlp", "resnet8, short", "text, sgd, short", "text, adamw, short")

TASKS_OF_RATES = tuple(f"regression, rate {rate}" for rate in REGRESSION_RATES)

# What docs/study.md begins with; the last task is the stress test.
TRAINING = Part(
    "training",
    (*SHORT, TASKS_OF_RATES[-1]),
    (
        *("uncompressed", "fp16", "4", "1", "1/4", "1/8", "1/4, momentum kept"),
        *("ladder 4-8-16", "ladder 4-1/4", "PowerSGD rank 1"),
    ),
)

# What longer trainings make of it.
LONGER = Part("longer", ("resnet8", "resnet20", "resnet8, 28x28"), ("uncompressed", "4", "1", "1/4", "1/8"), seeds=2)
LONGER_TEXT = Part("longer, text", ("text, sgd", "text, adamw"), LONGER.methods, once=("1", "1/8"))

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
        *("PowerSGD rank 1", "PowerSGD rank 1, no momentum"),
    ),
    once=("uncompressed, no momentum", "4, no momentum", "PowerSGD rank 1, no momentum", *_LESS),
)
# Where a rate is the largest that a training stands.
RATES = Part(
    "rates",
    TASKS_OF_RATES,
    (*TRAINING.methods, *_LESS, "uncompressed, no momentum", "4, no momentum", "1/4, c = 0.5"),
)

WORKERS = Part(
    "workers",
    ("resnet8, 8 workers",),
    (
        *("uncompressed", "8, scale per tensor", "4", "1/4, momentum kept", "1/4"),
        *("1/4, feedback of workers", "1/4, no feedback"),
    ),
    seeds=1,
)

ERROR_FEEDBACK = Part(
    "feedback",
    ("mlp, 4 workers",),
    (
        *("uncompressed", "8, scale per tensor"),
        *("8", *FEEDBACK[:2], "4", *FEEDBACK[2:4], "1/4", *FEEDBACK[4:]),
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

# The policies saw a thousand images, or text, that were neither trained with nor tested on.
_FEW_BITS = ("uncompressed", "1/8", "1/4")
STEERED = Part("policies", ("mlp", "resnet8, short"), (*_FEW_BITS, *POLICIES, *STEPS))
_ON_TEXT = (*POLICIES, *STEPS_ON_TEXT)
STEERED_ON_TEXT = Part("policies, text", ("text, sgd, short",), (*_FEW_BITS, *_ON_TEXT), once=_ON_TEXT)

# Each method at its best rate, rivals with what we give ourselves. The first rows decide most.
_OURS = ("4", "1", "1/4", "1/4, c = 0.5", "1/8", "ladder 4-1/4", "ladder 4-8-16")
_ROWS = {
    **{name: (name,) for name in ("uncompressed", "uncompressed, no momentum", *_OURS)},
    **{name: tuple(method.name for method in some) for name, some in RIVALS.items()},
    **{name: RECORDED_RIVALS[name] for name in ("DGC 1/4", "random-k 1/4", "LoCo 4", "natural, 9 bits")},
}
# Ours, and of the rivals the one of as few bits and those that came closest in the two tasks that have all rows.
_FEW = {
    name: _ROWS[name] for name in ("uncompressed", "4", "1/4", "1/8", "PowerSGD rank 1", "PowerSGD rank 4", "LoCo 4")
}
# Of AdamW's rate a factor is nothing but another rate.
_ON_ADAMW = {
    **{name: tuple(one for one in some if "c = " not in one) for name, some in _FEW.items()},
    "1-bit Adam": RECORDED_RIVALS["1-bit Adam"],
}
_FIRST = (("uncompressed", "1/4", "4"), ("PowerSGD rank 4",))

TUNED_REGRESSION = Tuned("tuned, regression", TASKS_OF_RATES[1], _ROWS, 50, _FIRST)
TUNED_TEXT = Tuned("tuned, text, sgd", "text, sgd, short", {**_ROWS, "fp16": ("fp16",)}, 12, _FIRST)
TUNED_MLP = Tuned("tuned, mlp", "mlp", _FEW, 6, _FIRST)
# The others on the MLP, by one seed: not to choose by.
OTHERS_MLP = Part(
    "rates of others, mlp",
    TUNED_MLP.tasks,
    tuple(dict.fromkeys(("uncompressed", *(one for name, some in _ROWS.items() if name not in _FEW for one in some)))),
    seeds=1,
    seed=TUNING[0],
)
_ON_IMAGES = {**_FEW, "fp16": ("fp16",)}
TUNED_RESNET = Tuned("tuned, resnet8", "resnet8, short", _ON_IMAGES, 6, (*_FIRST, ("PowerSGD rank 1",), ("fp16",)))
TUNED_ADAMW = Tuned("tuned, text, adamw", "text, adamw, short", _ON_ADAMW, 12, _FIRST)
# Two of twelve runs at 1/4 bit ended 4 and 6 points below: twice as many more say how rare that is. These residuals are
# bfloat16, those of the twelve were float32; what was chosen stays.
TUNED_AGAIN = Tuned(
    "tuned, text, sgd, again",
    TUNED_TEXT.task,
    {name: _ROWS[name] for name in ("uncompressed", "4", "1/4", "1/4, c = 0.5")},
    24,
    (("uncompressed", "1/4", "1/4, c = 0.5"),),
    seed=30,
)

# A run of 1/4 bit that was lost began with a gradient ten times as large as the others. Are any lost with clipping?
_CLIPPED = "text, sgd, short, clipped"
TUNED_CLIPPED = Tuned(
    "tuned, text, sgd, clipped",
    _CLIPPED,
    {
        **{name: _ROWS[name] for name in ("uncompressed", "4", "1/4", "PowerSGD rank 1", "PowerSGD rank 4")},
        "fp16": ("fp16",),
    },
    12,
    _FIRST,
)
CLIPPED_AGAIN = Tuned(
    "tuned, text, sgd, clipped, again",
    _CLIPPED,
    {name: _ROWS[name] for name in ("uncompressed", "1/4")},
    24,
    seed=TUNED_AGAIN.seed,
)
# Is a large batch worse at 1/4 bit, or only at this rate?
TUNED_BATCH = Tuned(
    "tuned, large batch",
    "text, sgd, short, batch x4, clipped",
    {
        **{name: _ROWS[name] for name in ("uncompressed", "4", "1/4", "PowerSGD rank 4", "uncompressed, no momentum")},
        "ladder 4-1/4": ("ladder 4-1/4",),
    },
    6,
    _FIRST,
)
# Are levels that follow the rate better than a constant one of as many bits? What that has of momentum is tried, too.
TUNED_BY_RATE = Tuned(
    "tuned, levels that follow the rate",
    TUNED_BATCH.task,
    {
        **{name: (name,) for name in ("uncompressed", "3", "ladder 4-1/4")},
        "2": ("2", "2, momentum 0.7", "2, momentum kept"),
        **{method.name: (method.name,) for method in BY_RATE},
        "1": ("1", "1, momentum 0.5", "1, momentum 0.7"),
    },
    6,
    (("uncompressed", "3"), ("2", "by rate 1/4-4-1/4, mean 2", "by rate 1-4-1, mean 2")),
    rates=(1, 2, 4),
)
# Can few bits follow when the rate has fallen, at the rate that is best uncompressed?
BATCH_RATE = Part(
    "large batch, x4",
    (varied(TUNED_BATCH.task, 4),),
    ("uncompressed", "4", "ladder 4-1/4"),
    seeds=6,
    seed=FRESH,
)
# What 4 bits in the first steps are good for, at a rate at which 1/4 bit alone is lost at times.
FIRST = Part(
    "first steps",
    (varied(TUNED_TEXT.task, 2), varied(_CLIPPED, 2)),
    ("uncompressed", "1/4", *(method.name for method in FIRST_STEPS[:2])),
    seeds=12,
    seed=TUNED_AGAIN.seed,
)

# How much momentum 1 to 4 bits want, each task at the rate that is best uncompressed (unclipped text: twice that; the
# large batch: at the half of it, where they are best). By the seeds that choose.
MOMENTUM_LEFT = Part(
    "momentum left",
    (
        *(varied(TUNED_TEXT.task, 2), varied(_CLIPPED, 2), varied(TUNED_ADAMW.task, 2)),
        *(varied(TUNED_RESNET.task, 4), varied(TUNED_BATCH.task, 2)),
    ),
    (
        *("uncompressed", "uncompressed, momentum 0.7", "uncompressed, momentum 0.5"),
        *("4", "4, momentum 0.7", "4, momentum 0.5"),
        *("3", "3, momentum 0.7", "3, momentum 0.5", "3, no momentum"),
        *("2, momentum kept", "2, momentum 0.7", "2, momentum 0.5", "2"),
        *("1, momentum 0.5", "1, momentum 0.3", "1"),
    ),
    seeds=len(TUNING),
    seed=TUNING[0],
)

# What was chosen of it, each task at the rate that is best uncompressed (unclipped text: twice that).
LESS_MOMENTUM = Part(
    "less momentum",
    (*MOMENTUM_LEFT.tasks[:4], varied(TUNED_BATCH.task, 4)),
    (
        *("uncompressed", "uncompressed, momentum 0.7", "4", "4, momentum 0.7", "3, momentum 0.7"),
        *("2, momentum 0.5", "1, momentum 0.3", "1/4"),
    ),
    seeds=6,
    seed=FRESH,
)

# The codes that do not clip, with all momentum, beside those that did. (Of these there are other seeds under "momentum
# left".) Each task as above, and the regression at its largest rate.
UNCLIPPED = Part(
    "codes that do not clip",
    (*MOMENTUM_LEFT.tasks[:4], varied(TASKS_OF_RATES[1], 2)),
    ("uncompressed", "4", *(method.name for method in (*NOT_CLIPPED, NOT_CLIPPED_LESS)), *WIDER),
    seeds=3,
    seed=FRESH,
)
# Is Nesterov's momentum the remedy for a share that arrives late?
WITH_NESTEROV = Part(
    "Nesterov",
    (*UNCLIPPED.tasks, LESS_MOMENTUM.tasks[-1]),
    ("uncompressed", *(method.name for method in (*NESTEROV, *FINER_LESS))),
    seeds=3,
    seed=FRESH,
)
NESTEROV_WITH_FORMER_CODES = Part(
    "Nesterov, codes of before",
    (UNCLIPPED.tasks[1], UNCLIPPED.tasks[-1]),
    ("uncompressed", *(method.name for method in NESTEROV_BEFORE)),
    seeds=3,
    seed=FRESH,
)
NESTEROV_IN_RECIPE = Part(
    "Nesterov, recipe", ("recipe, text",), ("uncompressed", *(method.name for method in NESTEROV)), seeds=3
)

# What the present codes cost there.
FINER_CODES = Part(
    "finer codes",
    UNCLIPPED.tasks,
    ("uncompressed", *(method.name for method in (*FINER[1:], *FINER_LESS))),
    seeds=3,
    seed=FRESH,
)

# What four codes gain at 2 bits.
_TWO_BITS = (
    "uncompressed",
    FINER[3].name,
    FOUR_CODES.name,
    NESTEROV[0].name,
    NESTEROV[3].name,
    FOUR_CODES_NESTEROV.name,
)
TWO_BITS = Part("two bits", (UNCLIPPED.tasks[1], UNCLIPPED.tasks[-1]), _TWO_BITS, seeds=3, seed=FRESH)
TWO_BITS_IN_RECIPE = Part("two bits, recipe", ("recipe, text",), _TWO_BITS, seeds=3)

# Rounded at random, without error feedback.
STOCHASTIC = Part(
    "stochastic rounding",
    UNCLIPPED.tasks[-1:],
    ("uncompressed", FINER[1].name, *(method.name for method in QSGD)),
    seeds=3,
    seed=FRESH,
)

# Unclipped gradients and hardly a warm-up, by the seeds of the largest rates: earlier codes lost up to five points.
SHORT_WARM_UPS = Part(
    "short warm-ups",
    tuple(varied("text, sgd, short", 1, warm_up) for warm_up in (0.02, 0.1)),
    ("uncompressed", "4", *(method.name for method in FINER[1:3])),
    seeds=2,
    seed=TUNING[0],
)

# What 4 bits cost as most people train, and whether more bits in the first steps make it less. 8 bits show how far
# trainings part that differ by next to nothing.
RECIPE = Part(
    "recipe",
    ("recipe, text",),
    (
        *("uncompressed", "fp16", "8", *(method.name for method in (*FINER[:2], *FINER_FIRST, *FINER[2:]))),
        *(*(method.name for method in FINER_LESS), "1/4", FIRST_STEPS[2].name),
        *("PowerSGD rank 4", "PowerSGD rank 4, small at 8, no momentum"),
    ),
    seeds=6,
)
RECIPE_BEFORE = Part(
    "recipe, codes of before",
    RECIPE.tasks,
    (
        *("uncompressed", "8", "5", NOT_CLIPPED[0].name, *(method.name for method in MORE_FIRST[:3])),
        *(NOT_CLIPPED[1].name, MORE_FIRST[3].name),
    ),
    seeds=6,
)
RECIPE_ELSEWHERE = Part(
    "recipe, other tasks",
    (
        "recipe, text, 4,000 steps",
        "recipe, text, momentum 0.7",
        "recipe, text, momentum 0.7, x2",
        "recipe, resnet8, x4",
    ),
    (
        *("uncompressed", *(method.name for method in (FINER[1], FINER_FIRST[0], FINER_FIRST[2], FINER[2]))),
        *(NOT_CLIPPED[0].name, *(method.name for method in MORE_FIRST[:2])),
    ),
    seeds=6,
)
# At which of two rates, by the seed that chooses.
RECIPE_AT_RATES = Part(
    "recipe, rates",
    tuple(varied(task, rate) for task, other in RECIPE_RATES.items() for rate in (1, other)),
    ("uncompressed", NOT_CLIPPED[0].name),
    seeds=1,
    seed=TUNING[0],
)

# The same where trainings are lost most easily.
LEVELS_BY_RATE = Part(
    "levels that follow the rate",
    FIRST.tasks[:1],
    ("uncompressed", "4", "3", "2", "1", *(method.name for method in (*BY_RATE, AGAINST_RATE)), "ladder 4-1/4"),
    seeds=6,
    seed=FIRST.seed,
)

# The cheap task alone, so that its table is there early.
_METHODS = ("uncompressed", "4", "1/4", "1/4, c = 0.5")
_REGRESSION = TASKS_OF_RATES[1]
LARGEST_REGRESSION = Largest("largest rates, regression", _METHODS, {_REGRESSION: LIMITS[_REGRESSION]})
LARGEST = Largest("largest rates", _METHODS, {task: LIMITS[task] for task in LIMITS if task != _REGRESSION})

# What the others have little of. The uncompressed runs are at the task's own rate.
BREADTH = Part(
    "breadth",
    ("mlp, skewed", "text, adamw, short, decay 0.1", "text, sgd, short, batch x4"),
    ("uncompressed", "4", "1/4", "1/8", "PowerSGD rank 4, small at 8, no momentum"),
)
# At 1/4 bit and unclipped two of three runs of the large batch were lost.
LARGE_BATCH = Part(
    "large batch",
    ("text, sgd, short, batch x4", "text, sgd, short, batch x4, clipped"),
    BREADTH.methods,
)
MORE_WORKERS = Part(
    "more workers",
    ("resnet8, short", "resnet8, 4 workers", "resnet8, 8 workers", "resnet8, 16 workers"),
    ("uncompressed", "4", "1/4", "1/8"),
)
# A training of a quarter of an hour: one seed chooses the rate.
LARGE = Tuned(
    "tuned, 10 million",
    "text, adamw, 10 million",
    {
        **{name: _ROWS[name] for name in ("uncompressed", "4", "1/4")},
        # Of AdamW's rate a factor is nothing but another rate.
        "PowerSGD rank 4": tuple(one for one in _ROWS["PowerSGD rank 4"] if "c = " not in one),
        "fp16": ("fp16",),
    },
    3,
    (("uncompressed", "4", "1/4"), ("PowerSGD rank 4",)),
    seed=0,
    rates=LARGE_RATES[:2],
    tuning_seeds=TUNING[:1],
)
# Eleven million values: a quarter of an hour, too. At the task's rate; is twice that better uncompressed?
RESNET18 = Part(
    "resnet18",
    tuple(varied("resnet18, 4 workers", rate) for rate in FEW_RATES),
    ("uncompressed", "4", "1/4"),
    seed=TUNING[0],
)
_FEWEST = {name: _ROWS[name] for name in RESNET18.methods}
# Do few bits stand a batch that grows with the workers?
GROWING = tuple(
    Tuned(f"tuned, {n} workers", f"resnet8, {n} workers, batch x{n // 4}", _FEWEST, 3, rates=FEW_RATES) for n in (8, 16)
)
# Twice the task's rate is too much for all of them; and is it the momentum that makes the difference?
LARGE_AT_RATES = Part(
    "10 million",
    tuple(varied(LARGE.task, rate) for rate in LARGE_RATES),
    ("uncompressed", "uncompressed, no momentum", "4", "1/4"),
    seeds=1,
    seed=TUNING[0],
)

# Is it that 0.9 is more momentum than is best, compressed or not?
LARGE_MOMENTUM = Part(
    "10 million, momentum",
    (LARGE.task,),
    ("uncompressed", "uncompressed, momentum 0.7", "4", "1/4"),
    seeds=3,
    seed=LARGE.seed,
)

# What the figure leaves out: tasks that have another table.
NOT_DRAWN = (TUNED_AGAIN, CLIPPED_AGAIN, TUNED_BY_RATE)

PARTS: tuple[Part | Tuned | Largest, ...] = (
    *(TRAINING, LONGER, MAIN, MOMENTUM, RATES, WORKERS, ERROR_FEEDBACK, ORDER, STEERED, STEERED_ON_TEXT),
    *(
        TUNED_REGRESSION,
        LARGEST_REGRESSION,
        TUNED_TEXT,
        TUNED_AGAIN,
        TUNED_MLP,
        OTHERS_MLP,
        TUNED_RESNET,
        LARGEST,
        TUNED_ADAMW,
    ),
    *(TUNED_CLIPPED, CLIPPED_AGAIN, TUNED_BATCH, TUNED_BY_RATE, BATCH_RATE),
    *(
        MOMENTUM_LEFT,
        LESS_MOMENTUM,
        UNCLIPPED,
        FINER_CODES,
        TWO_BITS,
        TWO_BITS_IN_RECIPE,
        STOCHASTIC,
        SHORT_WARM_UPS,
        WITH_NESTEROV,
        NESTEROV_WITH_FORMER_CODES,
        NESTEROV_IN_RECIPE,
        RECIPE,
        RECIPE_BEFORE,
        RECIPE_ELSEWHERE,
        RECIPE_AT_RATES,
        FIRST,
        LEVELS_BY_RATE,
        BREADTH,
        LARGE_BATCH,
        MORE_WORKERS,
        LONGER_TEXT,
        LARGE,
        RESNET18,
        LARGE_AT_RATES,
    ),
    LARGE_MOMENTUM,
    *GROWING,
)

# Whatever of the main table takes a few minutes on two cores.
_TRAINED = (
    *(name for name in MAIN.methods if name not in RECORDED),
    *(method.name for method in FINER[:3]),
    FOUR_CODES.name,
)
QUICK = (Part("main", ("mlp", "resnet8, short"), _TRAINED, seeds=1),)


def keys(parts: Iterable[Part | Tuned | Largest]) -> list[Key]:
    """The runs of several parts that may be wanted, each once, in their order."""
    return list(dict.fromkeys(key for part in parts for key in part.keys))
