"""The data sets of small images: where their files are, what is in them. Each file is checked before it is believed."""

from __future__ import annotations

import gzip
import importlib.util
import io
import tarfile
from http.client import HTTPException
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from torch import Tensor

from common.errors import RunError
from train.published import Published

# Images uint8 (N, C, H, W) and labels int64 (N,).
Labelled = tuple[Tensor, Tensor]

DATASETS = ("cifar10", "fashion-mnist", "digits")

# The binary version: the usual one, for Python, consists of pickles. Read from the archive, which has the checksum.
CIFAR10 = Published(
    "cifar-10-binary.tar.gz",
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    url="https://www.cs.toronto.edu/~kriz/",
)
_CIFAR10_PARTS = ([f"data_batch_{number}" for number in range(1, 6)], ["test_batch"])

# Where Debian's package dataset-fashion-mnist puts its files.
DEBIAN_FASHION_MNIST = (Path("/usr/share/datasets/fashion-mnist"), Path("/usr/share/dataset-fashion-mnist"))
_FASHION_MNIST_SUMS = {
    "train-images-idx3-ubyte.gz": "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "train-labels-idx1-ubyte.gz": "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "t10k-images-idx3-ubyte.gz": "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "t10k-labels-idx1-ubyte.gz": "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
}
_FASHION_MNIST_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"  # its publisher offers no https
FASHION_MNIST = tuple(
    Published(name, sha256, packed=True, url=_FASHION_MNIST_URL) for name, sha256 in _FASHION_MNIST_SUMS.items()
)

DIGITS = Published("digits.csv.gz", "6ebb3d2fee246a4e99363262ddf8a00a3c41bee6014c373ed9d9216ba7f651b8", packed=True)


def best_present(data_dir: Path) -> str:
    """The name of the best data set that needs no download.

    Raises:
        RunError: there is none, not even scikit-learn's.
    """
    if (data_dir / CIFAR10.name).is_file():
        return "cifar10"
    if _fashion_mnist_folder(data_dir):
        return "fashion-mnist"
    if importlib.util.find_spec("sklearn") is not None:
        return "digits"
    raise RunError(
        f"--dataset auto: no data set in {data_dir}, no Debian package dataset-fashion-mnist and no scikit-learn "
        "(python -m pip install scikit-learn); name one with --dataset to download it"
    )


def read(name: str, data_dir: Path) -> tuple[Labelled, Labelled]:
    """Training and test images of a data set.

    Args:
        name: one of ``DATASETS``.
        data_dir: where its files are looked for, and downloaded to.

    Raises:
        RunError: a file is damaged, or neither there nor to be downloaded.
        OSError: a file is there and cannot be read.
    """
    return {"cifar10": _cifar10, "fashion-mnist": _fashion_mnist, "digits": _digits}[name](data_dir)


def _cifar10(data_dir: Path) -> tuple[Labelled, Labelled]:
    archive = io.BytesIO(gzip.decompress(_get(CIFAR10, data_dir, "cifar10")))
    with tarfile.open(fileobj=archive) as tar:
        train, test = (b"".join(_member(tar, name) for name in names) for names in _CIFAR10_PARTS)
    return _cifar10_records(train), _cifar10_records(test)


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    return cast(IO[bytes], tar.extractfile(f"cifar-10-batches-bin/{name}.bin")).read()


def _cifar10_records(raw: bytes) -> Labelled:
    """A record is a label and an image's red, green and blue rows, a byte each."""
    records = torch.from_numpy(np.frombuffer(raw, np.uint8).reshape(-1, 1 + 3 * 32 * 32).copy())
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _fashion_mnist(data_dir: Path) -> tuple[Labelled, Labelled]:
    # Debian's package, or where torchvision, too, looks for them.
    folder = _fashion_mnist_folder(data_dir) or data_dir / "FashionMNIST" / "raw"
    images, labels, test_images, test_labels = (_idx(_get(file, folder, "fashion-mnist")) for file in FASHION_MNIST)
    return (images[:, None], labels.long()), (test_images[:, None], test_labels.long())


def _fashion_mnist_folder(data_dir: Path) -> Path | None:
    for folder in (data_dir, data_dir / "FashionMNIST" / "raw", *DEBIAN_FASHION_MNIST):
        if all((folder / file.name).is_file() for file in FASHION_MNIST):
            return folder
    return None


def _idx(raw: bytes) -> Tensor:
    """MNIST's format: two zeros, 8 for bytes, the number of dimensions; the dimensions, four bytes each; the values."""
    dims = raw[3]
    shape = [int(n) for n in np.frombuffer(raw, ">u4", count=dims, offset=4)]
    return torch.from_numpy(np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape).copy())


def _digits(_data_dir: Path) -> tuple[Labelled, Labelled]:
    """scikit-learn's 1,797 images of 8x8 pixels and 17 grey levels; every fifth one is a test image."""
    sklearn = importlib.util.find_spec("sklearn")
    if sklearn is None or not sklearn.submodule_search_locations:
        raise RunError("--dataset digits: scikit-learn is not installed (python -m pip install scikit-learn)")
    text = DIGITS.read(Path(sklearn.submodule_search_locations[0], "datasets", "data"))
    rows = np.loadtxt(io.BytesIO(text), delimiter=",", dtype=np.int64)
    images = torch.from_numpy((rows[:, :-1] * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    labels = torch.from_numpy(rows[:, -1].copy())
    is_test = torch.arange(len(rows)) % 5 == 4
    return (images[~is_test], labels[~is_test]), (images[is_test], labels[is_test])


def _get(file: Published, folder: Path, dataset: str) -> bytes:
    try:
        return file.get(folder)
    except (OSError, HTTPException) as error:  # urllib's errors are OSErrors
        if (folder / file.name).exists():
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        missing = f"--dataset {dataset}: {file.name} is not in {folder}, nor to be downloaded"
        raise RunError(f"{missing}: {reason}") from error
