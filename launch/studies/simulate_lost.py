"""What one quantization leaves of a gradient with its residual: the numbers that levels of tensors are allocated by.

    python launch/study.py --simulate lost --model resnet8 --steps 60

Trains anew at each level, with one worker whose gradients are quantized with error feedback, and prints, as Markdown,
the share of the squared norm of gradient + residual that a step leaves behind: of all large tensors, and the least and
the most of one tensor. The first half of the steps is not looked at: residuals need as long to be what they will be.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F

from common.markdown import markdown
from common.values import count, natural
from hvd_dyncomp import LEVELS
from screening.codec import fed_back
from training.batches import TrainBatches
from training.data import Data, load
from training.datasets import DATASETS
from training.models import DEPTHS, build_model

SMALL = 1024  # tensors of fewer values are not looked at


def shares(data: Data, bits: float, *, model: str, steps: int, seed: int) -> list[float]:
    """Of each large tensor: what is left of its squared norm, mean over the second half of the steps; then of all."""
    net = build_model(model, in_channels=data.in_channels, num_classes=10, seed=seed)
    parameters = list(net.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=5e-4)
    owed = {p: torch.zeros(p.numel()) for p in parameters if p.numel() >= SMALL}
    lost, whole = ({p: 0.0 for p in owed} for _ in range(2))
    shard = TrainBatches(data, 64, rank=0, size=1, seed=seed)
    batches = (batch for epoch in range(steps) for batch in shard.epoch(epoch))
    for step in range(steps):
        images, labels = next(batches)
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        for p, residual in owed.items():
            gradient = p.grad.flatten()  # type: ignore[union-attr]  # backward has made it
            arrived, owed[p] = fed_back(gradient, residual, bits)
            if step >= steps // 2:
                lost[p] += float(owed[p].square().sum())
                whole[p] += float((arrived + owed[p]).square().sum())
            p.grad = arrived.view_as(p)
        optimizer.step()
    return [*(lost[p] / whole[p] for p in owed), sum(lost.values()) / sum(whole.values())]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this experiment can be told, and its defaults."""
    add = parser.add_argument
    add("--model", choices=[f"resnet{depth}" for depth in DEPTHS], default="resnet8", help="default resnet8")
    add("--steps", type=count, default=200, metavar="N", help="of every training (default 200)")
    add("--seeds", type=count, default=2, metavar="N", help="trainings at each level (default 2)")
    add("--limit-train", type=natural, default=12000, metavar="N", help="training images (default 12000); 0: all")
    add("--dataset", choices=DATASETS, default="fashion-mnist", help="default fashion-mnist")
    add("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets lie (default data)")


def run(args: argparse.Namespace) -> None:
    """Train at every level and print the table.

    Raises:
        RunError: the data set is not there, or is another.
    """
    torch.set_num_threads(1)
    data = load(args.dataset, args.data_dir, limit_train=args.limit_train)
    rows: list[tuple[str, ...]] = []
    for bits in LEVELS[:-2]:
        found = [shares(data, bits, model=args.model, steps=args.steps, seed=seed) for seed in range(args.seeds)]
        tensors = [statistics.mean(own) for own in zip(*found, strict=True)]
        *each, all_of_it = tensors
        middle = statistics.median(each)
        rows.append((f"{bits}", f"{all_of_it:.2g}", f"{middle:.2g}", f"{min(each):.2g} to {max(each):.2g}"))
    print(markdown(("bits", "of all", "median tensor", "least to most of one"), rows), flush=True)
