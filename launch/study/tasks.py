"""What is trained: models with their data, optimizer and length, as plain data; and the same ready to run."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from study import text
from study.images import Data, TrainBatches, eval_batches, generator, load
from study.transformer import Transformer
from train.models import build_model

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Task:
    """One training, but for how its gradients travel.

    Attributes:
        name: stands in the table.
        model: a name that `train.models` knows, "mlp", "transformer" or "regression".
        data: "fashion-mnist", "digits" or "docstrings"; a regression makes up its own.
        limit: training images, or characters.
        half_size: images of half the height and width, a quarter of the time.
        augmented: images are shifted and mirrored.
        batch: images, pieces of text or points of each worker in a step.
        workers: simulated.
        epochs: passes over the images; of others, times 100 steps.
        optimizer: "sgd" or "adamw".
        momentum: of SGD, or AdamW's first beta.
        rate: the learning rate's peak.
        warm_up: for so much of the steps the rate rises, and then it falls to nothing.
        weight_decay: of all parameters.
        context: characters of a piece of text.
        width, layers: of a transformer.
        clip: the largest norm of all mean gradients together; larger ones are scaled down. 0: none are.
    """

    name: str
    model: str
    data: str = "fashion-mnist"
    limit: int = 12000
    half_size: bool = True
    augmented: bool = True
    batch: int = 32
    workers: int = 2
    epochs: int = 10
    optimizer: str = "sgd"
    momentum: float = 0.9
    rate: float = 0.1
    warm_up: float = 0.3
    weight_decay: float = 5e-4
    context: int = 32
    width: int = 64
    layers: int = 2
    clip: float = 0.0


_MLP = Task("mlp", "mlp", augmented=False, epochs=20, rate=0.05)
_REGRESSION = Task("regression, rate 0.05", "regression", data="", epochs=4, rate=0.05, weight_decay=0.0)
_TEXT = Task("text", "transformer", data="docstrings", limit=600_000, batch=8, epochs=40, weight_decay=0.0)

_SHORT = Task("resnet8, short", "resnet8", batch=64, epochs=8)
_TEXT_SHORT = replace(_TEXT, name="text, sgd, short", rate=0.3, epochs=15, context=64)
_ADAMW_SHORT = replace(_TEXT, name="text, adamw, short", optimizer="adamw", rate=3e-3, epochs=15, context=64)
_LARGE = replace(_ADAMW_SHORT, name="text, adamw, 10 million")
# As most people train: a warm-up of 3 to 5 % of the steps; AdamW with gradients clipped to 1 on text, SGD on images.
_RECIPE = replace(_ADAMW_SHORT, name="recipe, text", clip=1.0, warm_up=0.03)

TASKS = {
    task.name: task
    for task in (
        _MLP,
        _SHORT,
        *(replace(_SHORT, name=f"resnet8, {n} workers", workers=n, batch=128 // n) for n in (4, 8, 16)),
        _TEXT_SHORT,
        _ADAMW_SHORT,
        _REGRESSION,
        # What the others have little of: real weight decay, large batches, many values.
        replace(_ADAMW_SHORT, name="text, adamw, short, decay 0.1", weight_decay=0.1),
        replace(_TEXT_SHORT, name="text, sgd, short, batch x4", batch=32),
        replace(_TEXT_SHORT, name="text, sgd, short, batch x4, clipped", batch=32, clip=1.0),
        replace(_TEXT_SHORT, name="text, sgd, short, clipped", clip=1.0),
        replace(_LARGE, rate=1e-3, weight_decay=0.1, epochs=10, width=368, layers=6),
        replace(_SHORT, name="resnet18, 4 workers", model="resnet18", workers=4, batch=32, epochs=6),
        # A batch that grows with the workers, at the rate that was best for two of them.
        *(
            replace(_SHORT, name=f"resnet8, {n} workers, batch x{n // 4}", workers=n, batch=32, rate=0.4)
            for n in (8, 16)
        ),
        _RECIPE,
        replace(_RECIPE, name="recipe, text, 4,000 steps", epochs=40),
        replace(_RECIPE, name="recipe, text, momentum 0.7", momentum=0.7),
        replace(_SHORT, name="recipe, resnet8, x4", warm_up=0.05, rate=0.4),
        # Two quantizations a step in place of one, and a model nine times as large.
        replace(_RECIPE, name="recipe, text, 4 workers", workers=4, batch=4),
        replace(_RECIPE, name="recipe, text, 1 million", width=144, layers=4, rate=2e-3),
    )
}

# Of some tasks there are more: at so many times their rate, and with the rate rising for so much of the steps.
RATES = (0.5, 1, 2, 4)
LARGE_RATES = (0.5, 1)
FEW_RATES = (1, 2)
MORE_RATES = (0.25, 0.5, 1, 2, 4, 8, 16, 32)
FINE_RATES = (0.25, 0.35, 0.5, 0.7, 1, 1.4, 2, 2.8, 4, 5.6, 8, 11, 16)
WARM_UPS = (0.02, 0.1, 0.3)


def varied(name: str, rate: float = 1, warm_up: float = 0.3) -> str:
    """What a task is called at so many times its rate, with such a warm-up."""
    times = f", x{rate:g}" if rate != 1 else ""
    return name + times + (f", warm-up {warm_up:.0%}" if warm_up != 0.3 else "")


def _vary(name: str, rates: Iterable[float], warm_ups: Iterable[float] = (0.3,)) -> None:
    for rate, warm_up in itertools.product(rates, warm_ups):
        own = varied(name, rate, warm_up)
        TASKS[own] = replace(TASKS[name], name=own, rate=TASKS[name].rate * rate, warm_up=warm_up)


# By task: the rates between which the largest that trains is looked for.
LIMITS = {
    "regression, rate 0.05": FINE_RATES,
    "text, sgd, short": MORE_RATES,
    "mlp": MORE_RATES,
    "resnet8, short": MORE_RATES,
}

TUNED = (*LIMITS, "text, adamw, short", "text, sgd, short, clipped", "text, sgd, short, batch x4, clipped")

for _name in TUNED:
    _vary(_name, RATES)
_vary(_LARGE.name, LARGE_RATES)
for _name in ("resnet8, 8 workers, batch x2", "resnet8, 16 workers, batch x4"):
    _vary(_name, FEW_RATES)
for _name, _rates in LIMITS.items():
    _vary(_name, _rates, WARM_UPS)

STEPS = 100


@dataclass(frozen=True)
class Work:
    """A task with its data loaded.

    Attributes:
        model: a new one for a seed.
        steps: of an epoch.
        epoch: batches of all workers, by (seed, number of the epoch).
        loss: of a model's output and what it should have been.
        score: of a model: the share in % of what it predicts right, or of the variance that it explains, and its loss
            (natural logarithm, or mean square). With True on all of the test data, otherwise on a part.
    """

    model: Callable[[int], nn.Module]
    steps: int
    epoch: Callable[[int, int], Iterator[tuple[Batch, ...]]]
    loss: Callable[[Tensor, Tensor], Tensor]
    score: Callable[[nn.Module, bool], tuple[float, float]]


def prepare(task: Task, data_dir: Path) -> Work:
    """Load what the task needs.

    Raises:
        RunError: the data set is not there, or is another.
    """
    if task.model == "regression":
        return _regression(task)
    return _text(task) if task.model == "transformer" else _images(task, data_dir)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over all places; outputs (..., classes), targets (...)."""
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@torch.no_grad()
def _score(model: nn.Module, batches: Iterator[Batch]) -> tuple[float, float]:
    model.eval()
    right, loss, count = 0.0, 0.0, 0
    for inputs, targets in batches:
        outputs = model(inputs)
        right += float((outputs.argmax(-1) == targets).sum())
        loss += float(cross_entropy(outputs, targets)) * targets.numel()
        count += targets.numel()
    model.train()
    return 100 * right / count, loss / count


def _images(task: Task, data_dir: Path) -> Work:
    data = load(task.data, data_dir, task.limit)

    def sized(batch: Batch) -> Batch:
        images = F.avg_pool2d(batch[0], 2) if task.half_size else batch[0]
        return images.to(memory_format=torch.channels_last), batch[1]

    def shard(rank: int, seed: int) -> TrainBatches:
        return TrainBatches(data, task.batch, rank=rank, size=task.workers, seed=seed, augmented=task.augmented)

    def epoch(seed: int, number: int) -> Iterator[tuple[Batch, ...]]:
        shards = [shard(rank, seed).epoch(number) for rank in range(task.workers)]
        return (tuple(map(sized, batches)) for batches in zip(*shards, strict=True))

    def score(model: nn.Module, all_of_it: bool) -> tuple[float, float]:
        split = data.test if all_of_it else data.test.take(torch.arange(min(1000, len(data.test))))
        return _score(model, map(sized, eval_batches(split, data)))

    return Work(functools.partial(_image_model, task, data), len(shard(0, 0)), epoch, cross_entropy, score)


def _image_model(task: Task, data: Data, seed: int) -> nn.Module:
    if task.model == "mlp":
        side = data.train.images.shape[-1] // (2 if task.half_size else 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Linear(side**2, 256), nn.Linear(256, 128), nn.Linear(128, 10)]
        return nn.Sequential(nn.Flatten(), layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
    built = build_model(task.model, in_channels=1, num_classes=10, seed=seed)
    return cast(nn.Module, built.to(memory_format=torch.channels_last))  # type: ignore[call-overload]


def _text(task: Task) -> Work:
    whole = text.docstrings(task.limit)
    train, test = whole[: -len(whole) // 10], whole[-len(whole) // 10 :]
    length = task.context + 1
    pieces = test[: len(test) // length * length].view(-1, length)

    def epoch(seed: int, number: int) -> Iterator[tuple[Batch, ...]]:
        random = generator(seed, number)
        for _ in range(STEPS):
            starts = torch.randint(len(train) - task.context, (task.workers, task.batch, 1), generator=random)
            yield tuple((own[:, :-1], own[:, 1:]) for own in train[starts + torch.arange(length)])

    def score(model: nn.Module, all_of_it: bool) -> tuple[float, float]:
        chosen = pieces if all_of_it else pieces[::8]
        return _score(model, ((part[:, :-1], part[:, 1:]) for part in chosen.split(64)))

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return Transformer(text.CHARACTERS, width=task.width, context=task.context, layers=task.layers)

    return Work(model, STEPS, epoch, cross_entropy, score)


def _regression(task: Task) -> Work:
    """A map of 40 numbers to 10, with two hidden layers: a loss like a parabola, which stands no rate above a limit."""
    truth = torch.randn(40, 10, generator=torch.Generator().manual_seed(1))
    test = torch.randn(2, 1000, 40, generator=torch.Generator().manual_seed(2))[0]

    def epoch(seed: int, number: int) -> Iterator[tuple[Batch, ...]]:
        random = generator(seed, number)
        for _ in range(STEPS):
            points = torch.randn(task.workers, task.batch, 40, generator=random)
            yield tuple((own, own @ truth) for own in points)

    @torch.no_grad()
    def score(model: nn.Module, all_of_it: bool) -> tuple[float, float]:
        wanted = test @ truth
        loss = float(F.mse_loss(model(test), wanted))
        explained = 1 - loss / float(wanted.var())
        return 100 * max(0.0, explained) if math.isfinite(loss) else 0.0, loss

    def model(seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            layers = [nn.Linear(40, 120), nn.Linear(120, 61), nn.Linear(61, 10)]
        return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    return Work(model, STEPS, epoch, F.mse_loss, score)
