"""The study's ways to send gradients: what arrives of gradients, what is carried, and what is counted."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from study import aggregation, comparators
from study.aggregation import Small
from study.methods import METHODS
from study.workers import HEADER_BYTES, Workers

pytestmark = pytest.mark.soak  # research: what it has found is on the pages

SHAPES = [torch.Size((40, 30)), torch.Size((64, 32))]


def gradients(workers: int, seed: int = 0) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape.numel(), generator=generator) for shape in SHAPES] for _ in range(workers)]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_what_does_not_arrive_is_carried(bits: float, workers: int) -> None:
    """The mean of what was given is what has arrived and what residuals hold: the sum's too, if it has any."""
    exchange = Workers(workers, 1300)
    given, got = torch.zeros(1300), torch.zeros(1300)
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        own = [torch.randn(1300, generator=generator) for _ in range(workers)]
        given += torch.stack(own).mean(0)
        got += exchange.mean(own, bits)
    states = [exchange.residuals(rank) for rank in range(workers)]
    waiting = sum((state["residuals"].get("gradient", torch.zeros(1300)) for state in states), torch.zeros(1300))
    for shard in (shard for state in states for shard in state["shard_residuals"].values()):
        end = min(1300, shard["first"] + len(shard["values"]))
        waiting[shard["first"] : end] += shard["values"][: end - shard["first"]]
    error = (got + waiting / workers - given).norm() / given.norm()
    assert error < (5e-3 if bits < 8 else 5e-4)  # what is carried is bfloat16, exact to 2**-8 of itself


@pytest.mark.parametrize("name", ["uncompressed", "fp16", "2", "PowerSGD rank 4"])
@pytest.mark.parametrize("workers", [2, 3])
def test_what_arrives_in_many_steps_is_the_mean(name: str, workers: int) -> None:
    exchange = comparators.aggregator(METHODS[name], SHAPES, workers, 0)
    own, arrived = gradients(workers), torch.zeros(SHAPES[0].numel())
    for step in range(300):
        exchange.new_step(step / 300)
        arrived += exchange.mean(own)[0]
    mean = torch.stack([one[0] for one in own]).mean(0)
    assert (arrived / 300 - mean).norm() < 0.15 * mean.norm()


@pytest.mark.parametrize(
    ("name", "bits"),
    [
        ("uncompressed", 32),
        ("fp16", 16),
        ("1/4", 0.25 + 16 / 512),
        ("2", 2 + 16 / 128),
        ("top-k 1/4", 0.25),
        ("PowerSGD rank 1, small at 8", 32 * (64 + 64 + 64 + 32) / (64 * 64 + 64 * 32)),
    ],
)
def test_bits_are_those_of_the_wire(name: str, bits: float) -> None:
    shapes = [torch.Size((64, 64)), torch.Size((64, 32))]  # whole blocks
    exchange = comparators.aggregator(METHODS[name], shapes, 2, 0)
    own = [[torch.randn(shape.numel()) for shape in shapes] for _ in range(2)]
    for step in range(4):
        exchange.new_step(step / 4)
        exchange.mean(own)
    header = 8 * HEADER_BYTES / 6144 if METHODS[name].kind == "quantized" else 0
    assert exchange.traffic.bits == pytest.approx(bits + header, abs=2e-3)


def rival(name: str, workers: int = 2) -> aggregation.Aggregator:
    return comparators.aggregator(METHODS[name], SHAPES, workers, 0)


@pytest.mark.parametrize("name", ["PowerSGD rank 2, small at 8", "top-k 1/4, no momentum"])
@pytest.mark.parametrize("workers", [2, 3])
def test_what_is_sent_and_what_is_owed_is_what_was_put_in(name: str, workers: int) -> None:
    exchange = rival(name, workers)
    given, arrived = torch.zeros(exchange.values), torch.zeros(exchange.values)
    for step in range(9):
        exchange.new_step(step / 9)
        own = gradients(workers, step)
        given += torch.stack([torch.cat(one) for one in own]).mean(0)
        arrived += torch.cat(exchange.mean(own))
    owed = [torch.cat(list(one)) if isinstance(one, list) else one for one in exchange.owed]
    torch.testing.assert_close(arrived + torch.stack(owed).mean(0), given, rtol=1e-3, atol=1e-3)
    assert torch.stack(owed).norm() > 0.1 * given.norm()


def test_powersgd_is_torchs_hook() -> None:
    """Of one worker, the same step by step, but for rounding."""
    exchange = rival("PowerSGD rank 4", 1)
    state = powerSGD_hook.PowerSGDState(
        None, 4, random_seed=exchange.seed, start_powerSGD_iter=2, min_compression_rate=1
    )
    state.iter = 2
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        for step in range(5):
            own = gradients(1, step)
            exchange.new_step(step / 5)
            flat = torch.cat(own[0])
            parts = [part.view(shape) for part, shape in zip(flat.split(exchange.sizes), SHAPES, strict=True)]
            held = {"buffer": lambda flat=flat: flat, "gradients": lambda parts=parts: parts}
            bucket = SimpleNamespace(**held, index=lambda: 0, is_last=lambda: True)
            theirs = powerSGD_hook.powerSGD_hook(state, bucket).wait()
            torch.testing.assert_close(torch.cat(exchange.mean(own)), theirs, rtol=1e-4, atol=1e-4)
    finally:
        torch.distributed.destroy_process_group()


def test_at_first_everything_travels_uncompressed() -> None:
    name = "PowerSGD rank 1, small at 8, from 10%"
    exchange, method = rival(name), METHODS[name]
    start = method.budget[1][0]
    for step in range(100):
        exchange.new_step(step / 100)
        before = exchange.traffic.bytes
        exchange.mean(gradients(2, step))
        assert (exchange.traffic.bytes - before == 4 * exchange.values) == (step / 100 < start)
        assert method.small_bits_at(step / 100) == (32 if step / 100 < start else 8)
        assert method.momentum_at(step / 100) is None
    assert exchange.traffic.bits > 32 * start


@pytest.mark.parametrize(
    ("name", "bits", "sent"),
    [
        *[("uncompressed", 32, 4 * 300), ("fp16", 16, 2 * 300), ("1/4", 8, 512 + 4 * 2 + HEADER_BYTES)],
        *[("4, first 10% at 16", 16, 1024 + 4 * 2 + HEADER_BYTES)],
    ],
)
@pytest.mark.parametrize("workers", [2, 3])
def test_small_tensors_arrive_and_are_counted(name: str, bits: int, sent: int, workers: int) -> None:
    small = Small(METHODS[name], [100, 200], workers)
    arrived, expected = torch.zeros(200), torch.zeros(200)
    for step in range(9):
        generator = torch.Generator().manual_seed(step)
        own = [[torch.randn(size, generator=generator) for size in (100, 200)] for _ in range(workers)]
        means = small.mean(own, bits)
        assert [mean.numel() for mean in means] == [100, 200]
        arrived += means[1]
        expected += torch.stack([one[1] for one in own]).mean(0)
    assert (small.traffic.values, small.traffic.bytes) == (9 * 300, 9 * sent)
    error = (arrived - expected).abs().max()
    assert error < {32: 1e-5, 16: 1e-2, 8: 5e-2}[bits]
    assert (error > 1e-4) == (name not in ("uncompressed", "4, first 10% at 16"))
