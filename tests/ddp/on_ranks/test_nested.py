"""Backward within backward: buckets of one step come in several passes of autograd, inner ones and the outer one."""

import pytest
import torch
from problem import distributed, gradients, same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hvd_dyncomp import Controller, LockstepError
from hvd_dyncomp.exchange.step import Step

WIDTH = 60


class Recomputed(torch.autograd.Function):
    """What runs a backward of its own, as implicit and reversible layers do."""

    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        ctx.save_for_backward(x)
        return module(x).detach()

    @staticmethod
    def backward(ctx, gradient):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


def reentrant(module, x):
    return checkpoint(module, x, use_reentrant=True)


def recomputed(module, x):
    return Recomputed.apply(x, module)


def plain(module, x):
    return module(x)


class Layers(nn.Module):
    """Some layers, each called in a way of its own; a bucket of DDP holds about one."""

    def __init__(self, ways) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in ways])
        self.ways = ways

    def forward(self, x):
        for way, layer in zip(self.ways, self.layers, strict=True):
            x = way(layer, x)
        return x


def stepped(model, rank: int, step: int) -> None:
    model.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(8, WIDTH, generator=generator).requires_grad_()).pow(2).mean().backward()


# The first bucket is that of the last layer.
ALL = {
    "inner passes only": ((reentrant,) * 4, {}),
    "two in each inner pass": ((reentrant,) * 4, {"bucket_cap_mb": 0.03}),
    "static graph": ((reentrant,) * 4, {"static_graph": True}),
    "first in an inner pass": ((plain, recomputed, plain, reentrant), {}),
    "last in an inner pass": ((recomputed, reentrant, plain), {}),
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("case", ALL)
def test_a_step_may_take_several_passes(case, bits, rank):
    ways, arguments = ALL[case]
    arguments = {"bucket_cap_mb": 0.01, **arguments}
    stock = DistributedDataParallel(Layers(ways), **arguments)
    model, quantizer = distributed(bits, module=Layers(ways), ddp_arguments=arguments)
    for step in range(4):
        stepped(stock, rank, step)
        stepped(model, rank, step)
        for ours, theirs in zip(gradients(model), gradients(stock), strict=True):
            assert (ours - theirs).norm() <= (1e-6 if bits == 32 else 0.03) * theirs.norm()
        assert same_on_all_ranks(gradients(model))
    assert quantizer.meter.total().steps == 4


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", ["inner passes only", "last in an inner pass"])
def test_an_error_is_raised_where_a_pass_ends(case, rank):
    model, _ = distributed(Controller(4 if rank else 8), module=Layers(ALL[case][0]))
    with pytest.raises(LockstepError, match="has bits"):
        stepped(model, rank, 0)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("bucket", [0, 2])
def test_what_fails_in_an_inner_pass_is_raised_when_the_model_has_ended_its_pass(bucket, rank, monkeypatch):
    """On all ranks here, as they would wait for each other. The model can begin another pass, whose step says why."""
    model, _ = distributed(4, module=Layers((reentrant,) * 3))
    stepped(model, rank, 0)
    add, slots = Step.add, []

    def failing(step, slot, *arguments):
        slots.append(slot)
        return 1 / 0 if len(slots) == 2 * bucket + 1 else add(step, slot, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "add", failing)
        with pytest.raises(ZeroDivisionError):
            stepped(model, rank, 1)
    with pytest.raises(RuntimeError, match="was interrupted by"):
        stepped(model, rank, 2)
