"""Data sets of small images, held in memory as uint8 tensors: how they are split."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.errors import RunError
from train import datasets


@dataclass(frozen=True)
class Split:
    """Images uint8 (N, C, H, W) and labels int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Data:
    """Training, validation (held out of the training set) and test images, and what models and batches need to know.

    ``mean`` and ``std`` are float32 (1, C, 1, 1) in grey levels 0..255; ``padding`` (pixels) and ``flip`` say how
    training images are varied.
    """

    name: str
    train: Split
    val: Split
    test: Split
    num_classes: int
    mean: Tensor
    std: Tensor
    padding: int
    flip: bool

    @property
    def in_channels(self) -> int:
        return self.train.images.shape[1]


def load(name: str, data_dir: Path, *, val_size: int = 0, limit_train: int = 0, seed: int = 0) -> Data:
    """Read a data set and hold validation images out of its training images.

    Args:
        name: one of ``datasets.DATASETS``.
        data_dir: where its files are looked for, and downloaded to.
        val_size: validation images; 0 means a twelfth of the training images (5,000 of 60,000).
        limit_train: keep only so many training images, drawn at random; 0 keeps all. Validation and test stay whole.
        seed: chooses the validation images, and those that ``limit_train`` keeps; equal on all ranks.

    Raises:
        RunError: the data set is damaged, or neither there nor to be downloaded, or has too few images for the sizes
            asked for.
        OSError: it cannot be read.
    """
    whole, test = (Split(*labelled) for labelled in datasets.read(name, data_dir))
    val_size = val_size or len(whole) // 12
    if val_size >= len(whole):
        raise RunError(f"--val-size {val_size}: {name} has only {len(whole)} training images")
    order = torch.randperm(len(whole), generator=generator(seed))
    val, train = order[:val_size], order[val_size:]
    if limit_train > len(train):
        raise RunError(f"--limit-train {limit_train}: {name} leaves only {len(train)} images beside validation")
    train_split = whole.take(train[: limit_train or None])
    pixels = train_split.images.float()
    return Data(
        name=name,
        train=train_split,
        val=whole.take(val),
        test=test,
        num_classes=int(whole.labels.max()) + 1,
        mean=pixels.mean(dim=(0, 2, 3), keepdim=True),
        std=pixels.std(dim=(0, 2, 3), keepdim=True),
        padding={"cifar10": 4, "fashion-mnist": 2, "digits": 0}[name],
        # A mirrored digit is no digit.
        flip=name != "digits",
    )


def generator(*numbers: int) -> torch.Generator:
    """A generator whose stream depends on these non-negative integers alone and leaves global state untouched."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
