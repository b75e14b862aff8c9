"""The study's batches: shards, repetition, variation."""

import pytest
import torch

from study.images import Data, Split, TrainBatches, generator, varied

pytestmark = pytest.mark.soak  # research: what it has found is on the pages


@pytest.fixture(scope="module")
def data() -> Data:
    images = torch.randint(256, (101, 1, 28, 28), dtype=torch.uint8, generator=generator(0))
    split, pixels = Split(images, torch.arange(101) % 10), images.float()
    return Data(split, split, pixels.mean().view(1, 1, 1, 1), pixels.std().view(1, 1, 1, 1))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_cover_everything_with_equal_steps(data: Data, size: int) -> None:
    shards = [TrainBatches(data, 16, rank=rank, size=size, seed=0, augmented=False) for rank in range(size)]
    seen: list[int] = []
    for shard in shards:
        assert len(list(shard.epoch(3))) == len(shard) == len(shards[0])
        seen += list(shard.sampler)
    assert set(seen) == set(range(101)) and len(seen) - 101 < size


def test_epochs_differ_and_can_be_repeated(data: Data) -> None:
    def first_batch(epoch: int, rank: int) -> torch.Tensor:
        return next(iter(TrainBatches(data, 32, rank=rank, size=2, seed=0, augmented=True).epoch(epoch)))[0]

    assert torch.equal(first_batch(4, 0), first_batch(4, 0))
    assert not torch.equal(first_batch(4, 0), first_batch(5, 0))
    assert not torch.equal(first_batch(4, 0), first_batch(4, 1))


def test_variation_is_a_shift_and_a_mirror() -> None:
    image = torch.arange(1, 2 * 5 * 6 + 1, dtype=torch.uint8).view(1, 2, 5, 6)
    padded = torch.nn.functional.pad(image, (2, 2, 2, 2))
    windows = [padded[:, :, y : y + 5, x : x + 6] for y in range(5) for x in range(5)]
    possible = {window.numpy().tobytes() for window in windows}
    possible |= {window.flip(3).contiguous().numpy().tobytes() for window in windows}
    shown = varied(image.repeat(2000, 1, 1, 1), generator(0))
    # With 2000 draws each of the 50 variants is all but certain to come up.
    assert {view.numpy().tobytes() for view in shown} == possible
