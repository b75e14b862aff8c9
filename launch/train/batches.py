"""Batches of a data set that lies in memory: sharded over ranks, augmented, normalised.

A sample of a data set of this size costs more in a DataLoader's Python than in arithmetic, so a batch is cut out of
one tensor, augmented and normalised as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from train.data import Data, Split, generator


def augment(images: Tensor, *, padding: int, flip: bool, rng: torch.Generator) -> Tensor:
    """Shift every image of a batch by up to ``padding`` pixels, and mirror half of them; uint8 (N, C, H, W) in and out.

    A shift and a mirror are both a choice of source rows and columns, so one gather does the whole batch.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (padding,) * 4)
    top, left = torch.randint(0, 2 * padding + 1, (2, count, 1), generator=rng)
    rows = top + torch.arange(height)
    cols = left + torch.arange(width)
    if flip:
        mirrored = torch.rand(count, 1, generator=rng) < 0.5
        cols = torch.where(mirrored, cols.flip(1), cols)
    picked = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], cols[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


class TrainBatches:
    """One rank's shard of the training images, cut into batches anew each epoch.

    Iterating over ``epoch(e)`` gives (float32 images (B, C, H, W), int64 labels (B,)). Shuffling depends on (seed,
    epoch), augmentation on (seed, epoch, rank): an epoch can be repeated without the ones before it. The sampler
    repeats up to ``size - 1`` images so that every rank runs the same number of steps.
    """

    def __init__(self, data: Data, batch_size: int, *, rank: int, size: int, seed: int, augmented: bool = True) -> None:
        self.data, self.batch_size, self.rank, self.seed = data, batch_size, rank, seed
        self.augmented = augmented and (data.flip or data.padding > 0)
        # The sampler asks its data set for nothing but the length.
        numbers: Any = range(len(data.train))
        self.sampler: DistributedSampler = DistributedSampler(numbers, size, rank, shuffle=True, seed=seed)

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.sampler.set_epoch(epoch)
        rng = generator(self.seed, epoch, self.rank)
        for indices in torch.tensor(list(self.sampler)).split(self.batch_size):
            images = self.data.train.images[indices]
            if self.augmented:
                images = augment(images, padding=self.data.padding, flip=self.data.flip, rng=rng)
            yield normalise(images, self.data), self.data.train.labels[indices]


def eval_batches(split: Split, data: Data, *, rank: int, size: int, batch_size: int = 250) -> Iterator:
    """Every ``size``-th image of a split, beginning with the ``rank``-th: no image twice, none left out."""
    for indices in torch.arange(rank, len(split), size).split(batch_size):
        if len(indices):
            yield normalise(split.images[indices], data), split.labels[indices]


def normalise(images: Tensor, data: Data) -> Tensor:
    """uint8 (N, C, H, W) to float32 of zero mean and unit variance over the training set, per channel."""
    return (images.float() - data.mean) / data.std
