"""Mixed precision: `GradScaler`, whose scale changes and which skips steps."""

import pytest
import torch
from problem import Linear, distributed, gradients, same_on_all_ranks

OVERFLOW = 3  # the step in which rank 0's gradients are infinite


class Loop:
    """Scale, backward, unscale, clip, step, update; sums the gradients that the optimizer has used."""

    def __init__(self, bits: float, scale: float = 1024.0, interval: int = 2000, **arguments) -> None:
        self.model, self.quantizer = distributed(bits, module=Linear((5000,)), hierarchical=False, **arguments)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=interval)
        self.used = torch.zeros(5000, dtype=torch.float64)
        self.wanted = torch.zeros(5000, dtype=torch.float64)

    def step(self, seed: int, factor: float = 1.0) -> bool:
        """Whether the optimizer has stepped."""
        [value] = self.model.module.values
        before = value.detach().clone()
        self.optimizer.zero_grad()
        self.scaler.scale(self.model(seed) * factor).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1e4)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        stepped = not torch.equal(value, before)
        if stepped:
            self.used += gradients(self.model)[0]
            self.wanted += self.model.module.mean(seed)[0]
        return stepped

    def error(self) -> float:
        """Of the sum of used gradients, in norms of a mean."""
        return float((self.used - self.wanted).norm() / self.model.module.mean(0)[0].norm())


@pytest.mark.parametrize("bits", [1, 4, 16, 32])
def test_infinity_on_one_rank_skips_the_step_on_all(bits, rank):
    loop = Loop(bits)
    for step in range(8):
        overflows = step == OVERFLOW
        assert loop.step(step, float("inf") if overflows and rank == 0 else 1.0) == (not overflows)
        assert same_on_all_ranks([*loop.model.parameters(), torch.tensor(loop.scaler.get_scale())])
        state = loop.quantizer.state_dict()
        kept = [*state["residuals"].values(), *(shard["values"] for shard in state["shard_residuals"].values())]
        assert all(residual.isfinite().all() for residual in kept)
    assert loop.scaler.get_scale() == 512
    assert loop.error() < {1: 3.0, 4: 0.5, 16: 1e-3, 32: 1e-5}[bits]


@pytest.mark.parametrize("bits", [4, 1])
def test_residuals_keep_the_scale_that_they_were_made_with(bits, rank):
    """When it doubles, half of what they hold is lost: here often. -s prints docs/training.md's figures."""
    errors = {}
    for interval in (2000, 10, 2):
        loop = Loop(bits, 1.0, interval)
        assert all(loop.step(step) for step in range(40))
        assert loop.scaler.get_scale() == 2.0 ** (40 // interval)
        errors[interval] = loop.error()
    assert errors[2000] < errors[10] < 1.5 * errors[2000] and errors[2] < 2.6 * errors[2000]
    if rank == 0:
        print(f"{bits} bits: error of 40 gradients' sum by growth_interval:", errors)
