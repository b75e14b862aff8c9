"""Data sets of small images, held in memory as uint8 tensors: where they come from and how they are split."""

from __future__ import annotations

import gzip
import importlib.util
import math
import socket
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from course import RunError
from torch import Tensor

DATASETS = ("cifar10", "fashion-mnist", "digits")
# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN_FASHION_MNIST = (Path("/usr/share/datasets/fashion-mnist"), Path("/usr/share/dataset-fashion-mnist"))
_IDX_FILES = {
    "train": ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"),
    "test": ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"),
}
_DOWNLOAD_TIMEOUT = 30.0  # seconds without a byte


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


def best_present(data_dir: Path) -> str:
    """The name of the best data set that needs no download.

    Raises:
        RunError: there is none, not even scikit-learn's.
    """
    if (data_dir / "cifar-10-batches-py").is_dir():
        return "cifar10"
    if _fashion_mnist_folder(data_dir) or (data_dir / "FashionMNIST" / "raw").is_dir():
        return "fashion-mnist"
    if importlib.util.find_spec("sklearn") is not None:
        return "digits"
    raise RunError(
        f"--dataset auto: no data set in {data_dir}, no Debian package dataset-fashion-mnist and no scikit-learn; "
        "name one with --dataset to download it"
    )


def load(name: str, data_dir: Path, *, val_size: int = 0, limit_train: int = 0, seed: int = 0) -> Data:
    """Read a data set and hold validation images out of its training images.

    Args:
        name: one of ``DATASETS``.
        data_dir: where torchvision's classes look, and download to.
        val_size: validation images; 0 means a twelfth of the training images (5,000 of 60,000).
        limit_train: keep only so many training images, drawn at random; 0 keeps all. Validation and test stay whole.
        seed: chooses the validation images, and those that ``limit_train`` keeps; equal on all ranks.

    Raises:
        RunError: the data set is neither there nor to be downloaded, or has too few images for the sizes asked for.
    """
    reader = {"cifar10": _cifar10, "fashion-mnist": _fashion_mnist, "digits": _digits}[name]
    whole, test = reader(data_dir)
    _check(name, whole, test)
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


def _check(name: str, train: Split, test: Split) -> None:
    """Make sure that images and labels belong together: files of a data set may be whole and yet mixed up.

    Raises:
        RunError: naming what does not fit.
    """
    for part, split in (("training", train), ("test", test)):
        count, shape = len(split.labels), tuple(split.images.shape)
        if count == 0 or split.labels.dim() != 1 or len(shape) != 4 or shape[0] != count:
            raise RunError(
                f"--dataset {name}: {part} images of shape {shape} and {count} labels do not belong together"
            )
    if train.images.shape[1:] != test.images.shape[1:] or int(test.labels.max()) > int(train.labels.max()):
        raise RunError(f"--dataset {name}: training and test images differ in size or classes")


def _cifar10(data_dir: Path) -> tuple[Split, Split]:
    def split(part: Any) -> Split:
        return Split(torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), torch.tensor(part.targets))

    train, test = _from_torchvision("CIFAR10", data_dir)
    return split(train), split(test)


def _fashion_mnist(data_dir: Path) -> tuple[Split, Split]:
    folder = _fashion_mnist_folder(data_dir)
    if folder is not None:
        return _idx_split(folder, *_IDX_FILES["train"]), _idx_split(folder, *_IDX_FILES["test"])
    train, test = _from_torchvision("FashionMNIST", data_dir)
    return Split(train.data[:, None], train.targets), Split(test.data[:, None], test.targets)


def _idx_split(folder: Path, images: str, labels: str) -> Split:
    return Split(read_idx(folder / images)[:, None], read_idx(folder / labels).long())


def _fashion_mnist_folder(data_dir: Path) -> Path | None:
    names = [name for pair in _IDX_FILES.values() for name in pair]
    for folder in (data_dir, *DEBIAN_FASHION_MNIST):
        if all((folder / name).is_file() for name in names):
            return folder
    return None


def _digits(_data_dir: Path) -> tuple[Split, Split]:
    """scikit-learn's 1,797 images of 8x8 pixels and 17 grey levels; every fifth one is a test image."""
    if importlib.util.find_spec("sklearn") is None:
        raise RunError("--dataset digits: scikit-learn is not installed (python -m pip install scikit-learn)")
    from sklearn.datasets import load_digits

    raw = load_digits()
    images = torch.from_numpy((raw.images * (255 / 16)).astype(np.uint8))[:, None]
    whole = Split(images, torch.from_numpy(raw.target.astype(np.int64)))
    is_test = torch.arange(len(whole)) % 5 == 4
    return whole.take(torch.nonzero(~is_test).flatten()), whole.take(torch.nonzero(is_test).flatten())


def _from_torchvision(name: str, data_dir: Path) -> tuple[Any, Any]:
    """Training and test part of one of torchvision's data sets, downloaded where it is missing."""
    from vision import import_torchvision

    dataset = getattr(import_torchvision().datasets, name)
    patience = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT)
    try:
        return dataset(str(data_dir), train=True, download=True), dataset(str(data_dir), train=False, download=True)
    except Exception as error:  # torchvision lets urllib's, zipfile's, pickle's and its own errors through
        reason = " ".join(str(error).split())
        reason = reason or type(error).__name__
        raise RunError(
            f"--dataset: {name} is missing or damaged in --data-dir {data_dir}, nor to be downloaded: {reason}"
        ) from error
    finally:
        socket.setdefaulttimeout(patience)


def read_idx(path: Path) -> Tensor:
    """Read a gzipped file of MNIST's idx format into a uint8 tensor of the shape that its header states.

    Raises:
        RunError: the file is damaged.
    """
    try:
        raw = gzip.decompress(path.read_bytes())
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise RunError(f"{path}: damaged gzip file ({error})") from error
    dims = raw[3] if len(raw) >= 4 and raw[:3] == b"\x00\x00\x08" else 0
    shape = [int(n) for n in np.frombuffer(raw, ">u4", count=dims, offset=4)] if len(raw) >= 4 + 4 * dims else []
    if not dims or len(raw) != 4 + 4 * dims + math.prod(shape):
        raise RunError(f"{path}: not an idx file of unsigned bytes, or cut short")
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def generator(*numbers: int) -> torch.Generator:
    """A generator whose stream depends on these non-negative integers alone and leaves global state untouched."""
    state = np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state >> np.uint64(1)))
