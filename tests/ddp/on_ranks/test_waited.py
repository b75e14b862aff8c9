"""What counts as time that a rank was blocked by exchanges: `Meter.waited`, for `LinkAware`."""

import time

import pytest
import torch
import torch.distributed as dist
from problem import Linear, distributed
from torch import nn

from hvd_dyncomp import Averager, Meter

PAUSE = 0.6


class Pause(torch.autograd.Function):
    """Backward takes a while."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(PAUSE)
        return gradient


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(100, 100), nn.Linear(100, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Pause.apply(self.first(x))).sum()


def blocked(meter: Meter) -> float:
    return meter.total().waited_seconds


@pytest.mark.parametrize("bits", [4, 32])
def test_who_waits_for_a_slow_rank_is_blocked_and_the_slow_rank_is_not(bits, rank):
    model, quantizer = distributed(bits)
    averager = Averager(Linear().named_parameters(), bits)
    for meter, step in ((quantizer.meter, lambda: model(0).backward()), (averager.meter, lambda: mean(averager))):
        step()
        step()  # DDP builds its buckets anew, with a collective of its own in forward
        dist.barrier()
        meter.waited()
        before, began = blocked(meter), time.perf_counter()
        if rank == 0:
            time.sleep(PAUSE)
        step()
        waited, took = blocked(meter) - before, time.perf_counter() - began
        assert meter.waited() == pytest.approx(waited / took, abs=0.02)
        assert waited < PAUSE / 2 if rank == 0 else PAUSE / 2 < waited <= took


def mean(averager: Averager) -> None:
    averager.mean_(Linear().noise(0, dist.get_rank()))


@pytest.mark.parametrize("bits", [4, 32])
def test_an_exchange_that_backward_hides_blocks_nobody(bits):
    model, quantizer = distributed(bits, module=Slow(), min_numel=10)
    for _ in range(2):
        model(torch.ones(2, 100)).backward()
    before, began = blocked(quantizer.meter), time.perf_counter()
    model(torch.ones(2, 100)).backward()
    assert blocked(quantizer.meter) - before < PAUSE / 2 < PAUSE < time.perf_counter() - began
