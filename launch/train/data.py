"""Small images: torchvision's CIFAR-10 and Fashion-MNIST, and scikit-learn's digits."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset, TensorDataset

from common.errors import RunError
from train.job import Job

DATASETS = ("cifar10", "fashion-mnist", "digits")
_DEBIAN = Path("/usr/share/datasets/fashion-mnist")  # of the package dataset-fashion-mnist
_DIGITS = "datasets/data/digits.csv.gz"  # in scikit-learn
_EVALUATED = 250  # images of a batch


@dataclass(frozen=True)
class Images:
    """Training, validation (held out of the training set) and test images: float32 (channels, H, W), normalized."""

    train: Dataset
    validation: Dataset
    test: Dataset
    channels: int
    classes: int = 10

    @property
    def sizes(self) -> str:
        """In words."""
        parts = {"training": self.train, "validation": self.validation, "test": self.test}
        return ", ".join(f"{len(part)} {name}" for name, part in parts.items()) + " images"  # type: ignore[arg-type]

    def training_batches(self, args: argparse.Namespace, job: Job) -> DataLoader:
        """This rank's shard, in another order each epoch; all ranks have the same number of batches."""
        sampler: DistributedSampler = DistributedSampler(self.train, job.size, job.rank, seed=args.seed)
        return DataLoader(self.train, args.batch_size, sampler=sampler)

    def evaluation_batches(self, part: Dataset, job: Job) -> DataLoader:
        """Every `size`-th image of a part, from this rank's on: no image twice, none left out."""
        return DataLoader(Subset(part, range(job.rank, len(part), job.size)), _EVALUATED)  # type: ignore[arg-type]


def best_present(folder: Path) -> str:
    """The name of the best data set that needs no download, with files in the folder or of Debian's."""
    if (folder / "cifar-10-batches-py").is_dir():
        return "cifar10"
    return "fashion-mnist" if (folder / "FashionMNIST" / "raw").is_dir() or _DEBIAN.is_dir() else "digits"


def load(args: argparse.Namespace) -> Images:
    """Read a data set and hold validation images out of its training images.

    Raises:
        RunError: the data set is damaged or not there, or has too few images for the sizes asked for.
        OSError: it cannot be read or downloaded.
    """
    if args.dataset == "digits":
        whole, test = _digits()
        varied = whole
    else:
        varied, whole, test = _torchvision(args.dataset, Path(args.data_dir), args.download)
    val_size = args.val_size or len(whole) // 12  # type: ignore[arg-type]  # they have a length
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(args.seed)).tolist()  # type: ignore[arg-type]
    if val_size >= len(order):
        raise RunError(f"--val-size {val_size}: {args.dataset} has only {len(order)} training images")
    kept = order[val_size:]
    if args.limit_train > len(kept):
        raise RunError(f"--limit-train {args.limit_train}: {args.dataset} leaves only {len(kept)} beside validation")
    kept = kept[: args.limit_train or None]
    channels = 3 if args.dataset == "cifar10" else 1
    return Images(Subset(varied, kept), Subset(whole, order[:val_size]), test, channels)


def torchvisions(name: str, folder: Path, *, train: bool, download: bool = False, transform: Any = None) -> Any:
    """A data set of torchvision's in a folder, to which Debian's files are unpacked where they are the only ones.

    Raises:
        RunError: it is not there, or damaged.
    """
    # The import takes a second. Without the compiled operators, torchvision_operators.py sees to it.
    from torchvision import datasets
    from torchvision.datasets.utils import extract_archive

    kind = {"cifar10": datasets.CIFAR10, "fashion-mnist": datasets.FashionMNIST}[name]
    raw = folder / "FashionMNIST" / "raw"
    if name == "fashion-mnist" and not download and not raw.exists() and _DEBIAN.exists():
        begun = raw.with_name(f"raw.{os.getpid()}")  # not whole yet
        begun.mkdir(parents=True)
        for file in _DEBIAN.glob("*.gz"):
            extract_archive(str(file), str(begun))
        begun.rename(raw)
    try:
        return kind(folder, train=train, transform=transform, download=download)
    except RuntimeError as error:
        raise RunError(f"--dataset {name}: {error} (--data-dir {folder}; or add --download)") from error


def _torchvision(name: str, folder: Path, download: bool) -> tuple[Dataset, Dataset, Dataset]:
    """Training images, shifted and mirrored at random; the same as they are; test images."""
    from torchvision import transforms

    # By channel, over the training images.
    mean, std = {
        "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
        "fashion-mnist": ((0.2860,), (0.3530,)),
    }[name]
    plain = [transforms.ToTensor(), transforms.Normalize(mean, std)]
    shifts = transforms.RandomCrop(32, padding=4) if name == "cifar10" else transforms.RandomCrop(28, padding=2)
    as_is = transforms.Compose(plain)
    varied = transforms.Compose([shifts, transforms.RandomHorizontalFlip(), *plain])
    return (
        torchvisions(name, folder, train=True, download=download, transform=varied),
        torchvisions(name, folder, train=True, transform=as_is),
        torchvisions(name, folder, train=False, transform=as_is),
    )


def _digits() -> tuple[Dataset, Dataset]:
    images, labels = digits()
    images = (images - images.mean()) / images.std()
    is_test = torch.arange(len(labels)) % 5 == 4
    return TensorDataset(images[~is_test], labels[~is_test]), TensorDataset(images[is_test], labels[is_test])


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """scikit-learn's 1,797 images (N, 1, 8, 8) of 17 grey levels, float32, and their labels. Every fifth is to test.

    Raises:
        RunError: scikit-learn is not installed.
    """
    found = importlib.util.find_spec("sklearn")  # its import would need scipy
    if found is None or not found.submodule_search_locations:
        raise RunError("--dataset digits: needs scikit-learn: pip install scikit-learn")
    rows = torch.from_numpy(np.loadtxt(Path(found.submodule_search_locations[0], _DIGITS), np.float32, delimiter=","))
    return rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].long()
