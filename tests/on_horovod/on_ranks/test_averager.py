"""`Averager` over Horovod: loops without Horovod's optimizer."""

from contextlib import contextmanager

import horovod.torch as hvd
import pytest
import torch
from problem import DEVICE, Linear, assert_close, float64_sum, level_of, same_on_all_ranks, weights

from hvd_dyncomp import Averager, Controller, Schedule
from hvd_dyncomp.transport.horovod import HorovodTransport

SHAPE = {"block_size": 64, "bucket_bytes": 20_000}


def given(model: Linear, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(seed).backward()
    return [parameter.grad for parameter in model.parameters()]


def mean_of(tensors: list[torch.Tensor], name: str) -> list[torch.Tensor]:
    sums = [float64_sum(one.detach().cpu().numpy(), f"{name}.{i}") for i, one in enumerate(tensors)]
    return [torch.from_numpy(total) / hvd.size() for total in sums]


@pytest.mark.parametrize("bits", [1, 4, 16, 32])
def test_the_mean_is_the_expected_one_and_the_same_everywhere(bits):
    model = Linear()
    averager = Averager(model.named_parameters(), bits, **SHAPE)
    for seed in range(3):
        tensors = given(model, seed)
        expected = mean_of(tensors, f"averager.{bits}.{seed}")
        averager.mean_(tensors)
        assert same_on_all_ranks(tensors, f"averager.same.{bits}.{seed}")
        if seed == 0:
            for got, mean in zip(tensors, expected, strict=True):
                assert_close(got.cpu(), mean, level_of(got, bits))
    sent = averager.meter.total()
    assert sent.steps == 3 and (sent.saved_fraction > 0) == (bits < 32)


def test_several_averagers_and_a_level_that_moves(size):
    """They have the same parameters' names; each makes its own transport. One trains, the other averages changes."""
    controller = Controller(Schedule({0: 4, 1: 32, 2: 16}))
    model, local = Linear(), Linear()
    gradients = Averager(model.named_parameters(), controller, **SHAPE)
    changes = Averager(local.named_parameters(), controller, **SHAPE)
    mean = [torch.zeros_like(value, dtype=torch.float64) for value in weights(local)]
    for epoch in range(3):
        for step in range(2):
            tensors = given(model, 10 * epoch + step)
            gradients.mean_(tensors)
            torch.optim.SGD(model.parameters(), lr=1.0).step()
        before = weights(local)
        for step in range(2):
            given(local, 100 + 10 * epoch + step)
            torch.optim.SGD(local.parameters(), lr=1.0).step()
        changed = [after - value for after, value in zip(weights(local), before, strict=True)]
        for total, one in zip(mean, mean_of(changed, f"changes.{epoch}"), strict=True):
            total += one.to(DEVICE)
        changes.mean_(changed)
        with torch.no_grad():
            for parameter, value, change in zip(local.parameters(), before, changed, strict=True):
                parameter.copy_(value + change)
        controller.step({"loss": 1.0})
    assert gradients.meter.total().steps == 6
    for got, expected in zip(weights(local), mean, strict=True):
        # What was rounded at 4 bits was delivered at 32.
        assert (got - expected).norm() <= 0.01 * expected.norm() + 0.01


@contextmanager
def process_set(ranks: list[int]):
    made = hvd.add_process_set(ranks)
    try:
        yield made
    finally:
        hvd.remove_process_set(made)


def test_names_are_counted_by_process_set(rank, size):
    """What some ranks make among themselves does not make the others' names differ."""
    with process_set([0]) as alone:
        if rank == 0:
            one = Averager(Linear((3000,)).named_parameters(), 4, transport=HorovodTransport(alone), **SHAPE)
            one.mean_([torch.ones(3000, device=DEVICE)])
        model = Linear()
        averager = Averager(model.named_parameters(), 4, **SHAPE)
        assert len(set(hvd.allgather_object(averager._source.label, name="averager.labels"))) == 1
        tensors = given(model, 7)
        averager.mean_(tensors)
        assert same_on_all_ranks(tensors, "averager.sets")
