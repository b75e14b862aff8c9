"""`Averager` over a process group, without DistributedDataParallel."""

import copy

import pytest
import torch
import torch.distributed as dist
from problem import Linear, assert_means, same_on_all_ranks

from hvd_dyncomp import Averager, Controller, LockstepError, Schedule, ddp

SHAPE = {"block_size": 64, "bucket_bytes": 20_000}


@pytest.mark.parametrize("bits", [1, 4, 16, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mean_is_the_expected_one_and_the_same_everywhere(bits, dtype, rank):
    model = Linear(dtype=dtype)
    averager = Averager(model.named_parameters(), bits, **SHAPE)
    for seed in range(3):
        tensors = model.noise(seed, rank)
        averager.mean_(tensors)
        assert same_on_all_ranks(tensors)
        if seed == 0 and dtype is torch.float32:
            assert_means(tensors, model.mean(seed), bits)
    sent = averager.meter.total()
    assert sent.steps == 3 and (sent.compressed_bytes > 0) == (bits < 32)


def test_what_travels_uncompressed_is_exact(rank, size):
    model = Linear((3000, 700, 5), torch.complex64)
    for bits, kind in ((4, torch.complex64), (32, torch.complex64), (32, torch.float32)):
        named = [(name, parameter.detach().to(kind)) for name, parameter in model.named_parameters()]
        tensors = [tensor.to(kind) for tensor in model.noise(bits, rank)]
        everyone = zip(*(model.noise(bits, other) for other in range(size)), strict=True)
        expected = [torch.stack(one).mean(0).to(kind) for one in everyone]
        Averager(named, bits).mean_(tensors)
        assert same_on_all_ranks([torch.view_as_real(each) if each.is_complex() else each for each in tensors])
        for got, mean in zip(tensors, expected, strict=True):
            torch.testing.assert_close(got, mean)


def test_several_averagers_and_a_level_that_moves(rank, size):
    """They have the same parameters' names. Parameters that take local steps are averaged by what has changed."""
    controller = Controller(Schedule({0: 4, 1: 32, 2: 16}), transport=ddp.transport())
    models = [Linear(), Linear()]
    pair = [Averager(model.named_parameters(), controller, **SHAPE) for model in models]
    for epoch in range(3):
        for model, averager in zip(models, pair, strict=True):
            before = [parameter.detach().clone() for parameter in model.parameters()]
            for step in range(2):
                model.zero_grad()
                model(10 * epoch + step).backward()
                torch.optim.SGD(model.parameters(), lr=1.0).step()
            with torch.no_grad():
                changes = [parameter - value for parameter, value in zip(model.parameters(), before, strict=True)]
                averager.mean_(changes)
                for parameter, value, change in zip(model.parameters(), before, changes, strict=True):
                    parameter.copy_(value + change)
        controller.step({"loss": 1.0})  # which compares both models
    assert pair[0].label != pair[1].label
    everything = [
        sum(one) for one in zip(*(models[0].mean(10 * e + s) for e in range(3) for s in range(2)), strict=True)
    ]
    for model in models:
        for parameter, expected in zip(model.parameters(), everything, strict=True):
            # What was rounded at 4 bits was delivered at 32.
            assert (parameter + expected).norm() <= 0.01 * expected.norm() + 0.01


def test_beside_a_compressed_model(rank):
    """Both work over the same transport."""
    model = torch.nn.parallel.DistributedDataParallel(Linear())
    ddp.compress(model, 16)
    averager = Averager([("x", torch.zeros(3000))], 16)
    for seed in range(2):
        model.zero_grad()
        model(seed).backward()
        tensors = model.module.noise(seed + 10, rank)[:1]
        averager.mean_([tensors[0][:3000]])
        assert_means([tensors[0][:3000]], [model.module.mean(seed + 10)[0][:3000]], 16)
        assert_means([p.grad for p in model.parameters()], model.module.mean(seed), 16)


@pytest.mark.parametrize("bits", [4, 32])
def test_a_rank_that_gives_something_wrong_says_so_to_all(bits, rank):
    model = Linear()
    averager = Averager(model.named_parameters(), bits, **SHAPE)
    averager.mean_(model.noise(0, rank))
    state = copy.deepcopy(averager.state_dict())
    tensors, before = model.noise(1, rank), model.noise(1, rank)
    for spoiled, mine, others in (
        ([*tensors[:-1], torch.zeros(11)], r"tensors\[3\] \(values.3\) must have shape", "rank 1 cannot"),
        ([*tensors[:-1], None], "tensors that are None", "give zeros where only some ranks have a tensor"),
    ):
        with pytest.raises((ValueError, LockstepError), match=mine if rank == 1 else others):
            averager.mean_(spoiled if rank == 1 else tensors)
        assert all(map(torch.equal, tensors, before))
        averager.load_state_dict(state)
    averager.mean_(tensors)
    assert same_on_all_ranks(tensors)


def test_in_a_group_of_its_own(rank):
    group = dist.new_group([1, 0])
    if rank < 2:
        averager = Averager([("a", torch.zeros(3000))], 16, transport=ddp.transport(group))
        tensor = torch.full((3000,), float(rank))
        averager.mean_([tensor])
        torch.testing.assert_close(tensor, torch.full((3000,), 0.5))
    dist.barrier()
