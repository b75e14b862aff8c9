"""Parameters whose values lie in memory in another order than the logical one."""

import copy

import pytest
import torch
import torch.distributed as dist
from problem import distributed
from torch import Tensor, nn

from hvd_dyncomp.diagnostics import relative_errors

pytestmark = pytest.mark.promise("A saved residual is assigned to the right weights in any memory format.")

SHAPES = {"images": (24, 16, 3, 3), "matrix": (60, 44)}


class Stored(nn.Module):
    """The gradients are noise; `odd`: stored as channels_last, and transposed."""

    def __init__(self, odd: bool) -> None:
        super().__init__()
        images, matrix = (torch.zeros(shape) for shape in SHAPES.values())
        if odd:
            images, matrix = images.to(memory_format=torch.channels_last), torch.zeros(SHAPES["matrix"][::-1]).t()
        self.images, self.matrix = nn.Parameter(images), nn.Parameter(matrix)

    def forward(self, seed: int) -> Tensor:
        return sum((getattr(self, name) * value).sum() for name, value in noise(seed, dist.get_rank()).items())


def noise(seed: int, rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def made(odd: bool):
    """bfloat16 within hosts would lose a little."""
    return distributed(1, module=Stored(odd), hierarchical=False, bucket_bytes=10**6)


class Account:
    """What is owed by value: the sum of all gradients, less what was delivered."""

    def __init__(self) -> None:
        self.owed = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}

    def steps(self, model: nn.Module, seeds: range) -> None:
        size = dist.get_world_size()
        for seed in seeds:
            model.zero_grad()
            model(seed).backward()
            for name, owed in self.owed.items():
                owed += sum(noise(seed, rank)[name].double() for rank in range(size))
                owed -= size * getattr(model.module, name).grad.double()

    def check(self, quantizer) -> None:
        """Own residuals as they would be saved, plus what the owners of shards hold."""
        state = quantizer.state_dict()
        [bucket] = quantizer._plan.buckets
        shard = torch.zeros(bucket.blocks * bucket.block_size, dtype=torch.float64)
        shard[bucket.residuals.shard_range] = state["shard_residuals"][bucket.name]["values"].double()
        for slot in bucket.slots:
            kept = state["residuals"][slot.name].double() + slot.logical(shard)
            dist.all_reduce(kept)
            assert (kept - self.owed[slot.name]).norm() < 0.02 * kept.norm(), slot.name


@pytest.mark.parametrize("odd", [False, True])
def test_residuals_are_saved_in_logical_order(odd):
    model, quantizer = made(odd)
    account = Account()
    account.steps(model, range(3))
    account.check(quantizer)
    assert all(each.is_contiguous() for each in quantizer.state_dict()["residuals"].values())
    errors = relative_errors(quantizer, {name: p.grad for name, p in model.module.named_parameters()})
    assert errors.keys() == SHAPES.keys() and all(0 < error < 1 for error in errors.values())


@pytest.mark.parametrize("then", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_a_state_is_loaded_into_a_model_of_another_memory_format(first, then, size):
    model, quantizer = made(first)
    account = Account()
    account.steps(model, range(3))
    state = copy.deepcopy(quantizer.state_dict())
    model, quantizer = made(then)
    quantizer.load_state_dict(state)
    loaded = quantizer.state_dict()["residuals"]
    assert all(torch.equal(loaded[name], state["residuals"][name]) for name in SHAPES)
    if first == then or size == 2:  # otherwise those of shards begin at zero
        account.steps(model, range(3, 6))
        account.check(quantizer)
