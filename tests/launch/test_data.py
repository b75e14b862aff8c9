"""Data sets, splits, shards and augmentation."""

import gzip
import struct
from pathlib import Path

import data
import numpy as np
import pytest
import torch
from batches import TrainBatches, augment, eval_batches
from course import RunError


@pytest.fixture(scope="module")
def digits() -> data.Data:
    return data.load("digits", Path("nowhere"), val_size=101, seed=5)


def rows(split: data.Split) -> set[bytes]:
    return {image.numpy().tobytes() for image in split.images}


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    path.write_bytes(gzip.compress(header + array.tobytes()))


def test_digits_are_uint8_images(digits: data.Data) -> None:
    assert digits.train.images.shape[1:] == (1, 8, 8)
    assert digits.train.images.dtype == torch.uint8
    assert digits.train.labels.dtype == torch.int64
    assert digits.num_classes == 10
    assert len(digits.train) + len(digits.val) + len(digits.test) == 1797


def test_held_out_images_are_not_trained_on(digits: data.Data) -> None:
    assert len(digits.val) == 101
    # scikit-learn's digits contain no image twice, so images can stand for their numbers.
    assert len(rows(digits.train)) == len(digits.train)
    assert not rows(digits.train) & rows(digits.val)
    assert not (rows(digits.train) | rows(digits.val)) & rows(digits.test)


def test_splits_depend_on_the_seed_alone(digits: data.Data) -> None:
    again = data.load("digits", Path("nowhere"), val_size=101, seed=5)
    other = data.load("digits", Path("nowhere"), val_size=101, seed=6)
    assert torch.equal(again.val.images, digits.val.images)
    assert torch.equal(again.train.labels, digits.train.labels)
    assert not torch.equal(other.val.images, digits.val.images)
    # The test set is the same for everybody.
    assert torch.equal(other.test.images, digits.test.images)


def test_limit_train_leaves_validation_alone(digits: data.Data) -> None:
    limited = data.load("digits", Path("nowhere"), val_size=101, limit_train=64, seed=5)
    assert len(limited.train) == 64
    assert torch.equal(limited.val.images, digits.val.images)


@pytest.mark.parametrize(("sizes", "named"), [({"val_size": 1438}, "--val-size 1438"), ({"limit_train": 1400}, "1400")])
def test_sizes_beyond_the_data_set_are_refused(sizes: dict[str, int], named: str) -> None:
    with pytest.raises(RunError, match=named):
        data.load("digits", Path("nowhere"), **sizes)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_training_shards_cover_everything_with_equal_steps(digits: data.Data, size: int) -> None:
    shards = [TrainBatches(digits, 16, rank=rank, size=size, seed=0) for rank in range(size)]
    seen: list[int] = []
    for shard in shards:
        assert len(list(shard.epoch(3))) == len(shard) == len(shards[0])
        seen += list(shard.sampler)
    assert set(seen) == set(range(len(digits.train)))
    # Padding to equal length repeats fewer images than there are ranks.
    assert len(seen) - len(digits.train) < size


def test_evaluation_shards_are_exact(digits: data.Data) -> None:
    labels = [y for rank in range(3) for _, y in eval_batches(digits.test, digits, rank=rank, size=3, batch_size=7)]
    assert len(torch.cat(labels)) == len(digits.test)
    assert torch.equal(torch.cat(labels).bincount(), digits.test.labels.bincount())


def test_epochs_differ_and_can_be_repeated(digits: data.Data) -> None:
    varied = data.Data(**{**digits.__dict__, "padding": 1, "flip": True})

    def first_batch(epoch: int, rank: int) -> torch.Tensor:
        return next(iter(TrainBatches(varied, 32, rank=rank, size=2, seed=0).epoch(epoch)))[0]

    assert torch.equal(first_batch(4, 0), first_batch(4, 0))
    assert not torch.equal(first_batch(4, 0), first_batch(5, 0))
    assert not torch.equal(first_batch(4, 0), first_batch(4, 1))


def test_batches_are_normalised(digits: data.Data) -> None:
    images = torch.cat([x for x, _ in TrainBatches(digits, 64, rank=0, size=1, seed=0, augmented=False).epoch(0)])
    assert images.mean().item() == pytest.approx(0, abs=1e-3)
    assert images.std().item() == pytest.approx(1, abs=1e-3)


def test_augmentation_is_a_shift_and_a_mirror() -> None:
    image = torch.arange(1, 2 * 5 * 6 + 1, dtype=torch.uint8).view(1, 2, 5, 6)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = [padded[:, :, y : y + 5, x : x + 6] for y in range(5) for x in range(5)]
    possible = {window.numpy().tobytes() for window in windows}
    possible |= {window.flip(3).contiguous().numpy().tobytes() for window in windows}
    shown = augment(image.repeat(2000, 1, 1, 1), padding=2, flip=True, rng=data.generator(0))
    assert shown.dtype == torch.uint8
    # With 2000 draws each of the 50 variants is all but certain to come up.
    assert {view.numpy().tobytes() for view in shown} == possible


def test_idx_files_are_read(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_idx(tmp_path / "a.gz", array)
    assert torch.equal(data.read_idx(tmp_path / "a.gz"), torch.from_numpy(array))


@pytest.mark.parametrize("damage", ["gzip", "deflate", "body", "magic", "size"])
def test_damaged_idx_files_are_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.gz"
    write_idx(path, np.zeros((2, 3, 4), np.uint8))
    whole = path.read_bytes()
    raw = gzip.decompress(whole)
    damaged = {
        "gzip": whole[:-9],
        "deflate": whole[:10] + b"\xff" * 8 + whole[18:],
        "body": gzip.compress(raw[:-1]),
        "magic": gzip.compress(b"x" + raw[1:]),
        "size": gzip.compress(raw[:4] + b"\xff" * 12 + raw[16:]),
    }
    path.write_bytes(damaged[damage])
    with pytest.raises(RunError, match="a.gz"):
        data.read_idx(path)


def test_fashion_mnist_is_found_in_the_data_dir(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for (images, labels), count in zip(data._IDX_FILES.values(), (48, 10), strict=True):
        write_idx(tmp_path / images, rng.integers(0, 256, (count, 28, 28), dtype=np.uint8))
        write_idx(tmp_path / labels, (np.arange(count) % 10).astype(np.uint8))
    assert data.best_present(tmp_path) == "fashion-mnist"
    found = data.load("fashion-mnist", tmp_path)
    assert (len(found.train), len(found.val), len(found.test)) == (44, 4, 10)
    assert found.in_channels == 1 and found.flip


def test_best_present_prefers_cifar10(tmp_path: Path) -> None:
    (tmp_path / "cifar-10-batches-py").mkdir()
    assert data.best_present(tmp_path) == "cifar10"
