"""The example's data: found, split, sharded, downloaded only when asked to."""

import gzip
from pathlib import Path

import pytest
import torch

from common.errors import RunError
from train import data
from train.options import parse


def load(line: str) -> data.Images:
    args = parse(line.split())
    return data.load(args)


def rows(part) -> set[bytes]:
    return {image.numpy().tobytes() for image, _ in part}


class Rank:
    """Of three."""

    size = 3

    def __init__(self, rank: int) -> None:
        self.rank = rank


def test_held_out_images_are_not_trained_on() -> None:
    """scikit-learn's digits contain no image twice, so images can stand for their numbers."""
    images = load("--dataset digits --val-size 101 --seed 5")
    train, validation, test = map(rows, (images.train, images.validation, images.test))
    assert (len(train), len(validation), len(test)) == (1438 - 101, 101, 359)
    assert not train & validation and not (train | validation) & test
    again, other = (load(f"--dataset digits --val-size 101 --seed {seed}") for seed in (5, 6))
    assert rows(again.validation) == validation and rows(other.validation) != validation
    assert rows(other.test) == test  # the same for everybody


@pytest.mark.parametrize("flag", ["--val-size 1438", "--limit-train 1400"])
def test_sizes_beyond_the_data_set_are_refused(flag: str) -> None:
    with pytest.raises(RunError, match=flag):
        load(f"--dataset digits {flag}")


def test_shards_cover_everything() -> None:
    """Of training images with as many steps on all ranks; of others exactly."""
    images, args = load("--dataset digits"), parse(["--batch-size", "16"])
    shards = [images.training_batches(args, Rank(rank)) for rank in range(3)]
    assert len({len(list(shard)) for shard in shards}) == 1
    assert {number for shard in shards for number in shard.sampler} == set(range(len(images.train)))
    labels = [y for rank in range(3) for _, y in images.evaluation_batches(images.test, Rank(rank))]
    assert torch.equal(torch.cat(labels).bincount(), torch.tensor([y for _, y in images.test]).bincount())


def lay(folder: Path, *, packed: bool) -> None:
    """Fashion-MNIST's files, with three images each."""
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        for name, dims in (("images-idx3", (3, 28, 28)), ("labels-idx1", (3,))):
            raw = (
                bytes([0, 0, 8, len(dims)])
                + b"".join(n.to_bytes(4, "big") for n in dims)
                + bytes(torch.Size(dims).numel())
            )
            path = folder / f"{part}-{name}-ubyte"
            path.with_suffix(".gz").write_bytes(gzip.compress(raw)) if packed else path.write_bytes(raw)


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_mnist_is_found(packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torchvision has it, or packed where Debian has it."""
    monkeypatch.setattr(data, "_DEBIAN", tmp_path / "debian")
    lay(tmp_path / "debian" if packed else tmp_path / "data" / "FashionMNIST" / "raw", packed=packed)
    assert data.best_present(tmp_path / "data") == "fashion-mnist"
    images = load(f"--dataset fashion-mnist --val-size 1 --data-dir {tmp_path / 'data'}")
    assert images.sizes == "2 training, 1 validation, 3 test images"
    pixels, label = images.train[0]
    assert pixels.shape == (1, 28, 28) and pixels.dtype == torch.float32 and label == 0


@pytest.mark.parametrize("name", ["cifar10", "fashion-mnist"])
def test_nothing_is_downloaded_without_being_asked_for(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "_DEBIAN", tmp_path / "debian")
    assert data.best_present(tmp_path) == "digits"
    with pytest.raises(RunError, match=f"--dataset {name}: .*add --download"):
        load(f"--dataset {name} --data-dir {tmp_path}")
