"""Which placement of the codes trains best: an experiment with simulated workers, for docs/tables/simulations.md.

    python launch/study.py --simulate placements --seeds 3 --epochs 4

One process plays all ranks, with the library's own exchange, and trains a ResNet-8 on a part of Fashion-MNIST once for
every (placement, seed). Printed is the test accuracy in %, as Markdown.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from common.values import count, natural
from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import reference
from hvd_dyncomp.kernels.reference import Placement
from screening.workers import Workers
from training.batches import TrainBatches, eval_batches
from training.data import Data, load
from training.datasets import DATASETS
from training.models import build_model

CANDIDATES = {
    "4 bits, mid-tread": (4, Placement(7, False, 0.30, 0.04)),
    "4 bits, mid-rise": (4, Placement(8, True, 0.29, 0.04)),
    "4 bits, maximum": (4, Placement(7, False, 0.0, 1 / 7)),
    "3 bits, mid-tread": (3, Placement(3, False, 0.50, 0.05)),
    "3 bits, mid-rise": (3, Placement(4, True, 0.47, 0.05)),
    "2 bits, mid-tread": (2, Placement(1, False, 1.1, 0.05)),
    "2 bits, mid-rise": (2, Placement(2, True, 0.85, 0.05)),
    "1 bit": (1, Placement(1, True, 0.0, 0.0)),
}


def train(data: Data, bits: float, *, epochs: int, seed: int, size: int) -> float:
    """Trains once; returns the test accuracy."""
    model = build_model("resnet8", in_channels=data.in_channels, num_classes=10, seed=seed)
    parameters = list(model.parameters())
    large = [parameter.numel() >= 1024 for parameter in parameters]
    sizes = [parameter.numel() for parameter, is_large in zip(parameters, large, strict=True) if is_large]
    workers = Workers([1] * size, sum(sizes)) if bits < 32 else None
    shards = [TrainBatches(data, 64, rank=rank, size=size, seed=seed) for rank in range(size)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=epochs * len(shards[0]))
    for epoch in range(epochs):
        for batch in zip(*(shard.epoch(epoch) for shard in shards), strict=True):
            losses = [F.cross_entropy(model(images), labels) for images, labels in batch]
            gradients = [torch.autograd.grad(loss, parameters) for loss in losses]
            flat = [
                torch.cat([g.flatten() for g, is_large in zip(own, large, strict=True) if is_large])
                for own in gradients
            ]
            mean = workers.mean(flat, bits) if workers else torch.stack(flat).mean(0)
            means = iter(mean.split(sizes))
            for parameter, is_large, *own in zip(parameters, large, *gradients, strict=True):
                parameter.grad = next(means).view_as(parameter) if is_large else torch.stack(own).mean(0)
            optimizer.step()
            schedule.step()
    return test_accuracy(model, data)


@torch.no_grad()
def test_accuracy(model: torch.nn.Module, data: Data) -> float:
    model.eval()
    batches = eval_batches(data.test, data, rank=0, size=1)
    return sum((model(images).argmax(1) == labels).sum().item() for images, labels in batches) / len(data.test)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this experiment can be told, and its defaults."""
    add = parser.add_argument
    add("--seeds", type=count, default=3, metavar="N", help="trainings of each placement (default 3)")
    add("--epochs", type=count, default=4, metavar="N", help="of every training (default 4)")
    add("--limit-train", type=natural, default=12000, metavar="N", help="training images (default 12000); 0: all")
    add("--workers", type=count, default=2, metavar="N", help="that are simulated (default 2)")
    add(
        "--bound",
        type=float,
        default=reference.RESIDUAL_BOUND,
        metavar="C",
        help="equation 1a's c (default %(default)s)",
    )
    add("--dataset", choices=DATASETS, default="fashion-mnist", help="default fashion-mnist")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets lie (default data)")


def run(args: argparse.Namespace) -> None:
    """Train all and print the table.

    Raises:
        RunError: the data set is not there, or is another.
    """
    torch.set_num_threads(1)
    kernels.backends.clear()  # the native ones know the library's constants only
    reference.RESIDUAL_BOUND = args.bound
    data = load(args.dataset, args.data_dir, limit_train=args.limit_train)
    print("| placement | " + " | ".join(f"seed {seed}" for seed in range(args.seeds)) + " | mean |")
    print("|---" * (args.seeds + 2) + "|")
    for name, (bits, placement) in itertools.chain({"uncompressed": (32, None)}.items(), CANDIDATES.items()):
        if placement is not None:
            reference.PLACEMENTS[bits] = placement
        scores = [
            100 * train(data, bits, epochs=args.epochs, seed=seed, size=args.workers) for seed in range(args.seeds)
        ]
        print(
            f"| {name} | " + " | ".join(f"{s:.2f}" for s in scores) + f" | {statistics.mean(scores):.2f} |", flush=True
        )
