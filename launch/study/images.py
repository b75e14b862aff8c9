"""Images in memory, and batches of simulated workers: cut out of one tensor, varied and normalised as a whole.

A DataLoader takes 15 times as long for a batch, which is nothing beside one rank's step, and much beside a study's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DistributedSampler

from train.data import digits, torchvisions

_PADDING = 2  # pixels by which training images are shifted


@dataclass(frozen=True)
class Split:
    """Images uint8 (N, 1, H, W) and labels int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: Tensor) -> Split:
        return Split(self.images[indices], self.labels[indices])


@dataclass(frozen=True)
class Data:
    """Training and test images; mean and deviation (1, 1, 1, 1) of the training images in grey levels 0..255; whether
    training images are shifted and mirrored (digits are not).
    """

    train: Split
    test: Split
    mean: Tensor
    std: Tensor
    varies: bool = True

    def normalised(self, images: Tensor) -> Tensor:
        """uint8 to float32 of zero mean and unit variance over the training set."""
        return (images.float() - self.mean) / self.std


def load(name: str, folder: Path, limit: int) -> Data:
    """Of "fashion-mnist" or "digits", so many training images, drawn at random from all but a twelfth of them.

    Raises:
        RunError: the data set is not there.
    """
    whole, test = (_split(name, folder, train=train) for train in (True, False))
    order = torch.randperm(len(whole), generator=generator(0))[len(whole) // 12 :][:limit]
    train = whole.take(order)
    pixels = train.images.float()
    dims = (0, 2, 3)
    return Data(train, test, pixels.mean(dims, keepdim=True), pixels.std(dims, keepdim=True), name != "digits")


def _split(name: str, folder: Path, *, train: bool) -> Split:
    if name == "digits":
        grey, labels = digits()
        chosen = (torch.arange(len(labels)) % 5 == 4) != train
        return Split((grey[chosen] * (255 / 16)).to(torch.uint8), labels[chosen])
    images = torchvisions(name, folder, train=train)
    return Split(images.data[:, None], images.targets)


def generator(*numbers: int) -> torch.Generator:
    """A generator whose stream depends on these non-negative integers alone and leaves global state untouched."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))


def varied(images: Tensor, rng: torch.Generator) -> Tensor:
    """Shift every image of a batch, and mirror half of them; uint8 (N, C, H, W) in and out.

    A shift and a mirror are both a choice of source rows and columns, so one gather does the whole batch.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (_PADDING,) * 4)
    top, left = torch.randint(0, 2 * _PADDING + 1, (2, count, 1), generator=rng)
    rows = top + torch.arange(height)
    cols = left + torch.arange(width)
    mirrored = torch.rand(count, 1, generator=rng) < 0.5
    cols = torch.where(mirrored, cols.flip(1), cols)
    picked = padded[torch.arange(count)[:, None, None], :, rows[:, :, None], cols[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


class TrainBatches:
    """One worker's shard of the training images, cut into batches anew each epoch.

    Iterating over ``epoch(e)`` gives (float32 images (B, 1, 28, 28), int64 labels (B,)). Shuffling depends on (seed,
    epoch), variation on (seed, epoch, rank).
    """

    def __init__(self, data: Data, batch_size: int, *, rank: int, size: int, seed: int, augmented: bool) -> None:
        self.data, self.batch_size, self.rank, self.seed, self.augmented = (
            data,
            batch_size,
            rank,
            seed,
            augmented and data.varies,
        )
        self.sampler: DistributedSampler = DistributedSampler(data.train, size, rank, shuffle=True, seed=seed)  # type: ignore[arg-type]  # it asks for the length only

    def __len__(self) -> int:
        return -(-len(self.sampler) // self.batch_size)

    def epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        self.sampler.set_epoch(epoch)
        rng = generator(self.seed, epoch, self.rank)
        for indices in torch.tensor(list(self.sampler)).split(self.batch_size):
            batch = self.data.train.take(indices)
            images = varied(batch.images, rng) if self.augmented else batch.images
            yield self.data.normalised(images), batch.labels


def eval_batches(split: Split, data: Data) -> Iterator[tuple[Tensor, Tensor]]:
    """All images, in order."""
    for images, labels in zip(split.images.split(250), split.labels.split(250), strict=True):
        yield data.normalised(images), labels
