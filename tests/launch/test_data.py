"""Splits, shards and augmentation."""

from pathlib import Path

import pytest
import torch

from common.errors import RunError
from train import data
from train.batches import TrainBatches, augment, eval_batches


@pytest.fixture(scope="module")
def digits() -> data.Data:
    return data.load("digits", Path("nowhere"), val_size=101, seed=5)


def rows(split: data.Split) -> set[bytes]:
    return {image.numpy().tobytes() for image in split.images}


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
