"""Replicas hold the same bits, at every level and through every switch."""

import random

import horovod.torch as hvd
import pytest
import torch
from problem import DEVICE, Problem, same_on_all_ranks

from hvd_dyncomp import LEVELS, AllRanks, Controller, DynamicQuantizer, Schedule

pytestmark = pytest.mark.promise("All replicas are equal bit for bit, also when the level changes.")


def train(steps, **arguments):
    torch.manual_seed(7)  # the same model everywhere
    model = torch.nn.Sequential(
        torch.nn.Linear(40, 120), torch.nn.ReLU(), torch.nn.Linear(120, 61), torch.nn.ReLU(), torch.nn.Linear(61, 10)
    ).to(DEVICE)
    levels = random.Random(3)
    schedule = Schedule({epoch: levels.choice(LEVELS) for epoch in range(steps)})
    q = DynamicQuantizer(Controller(schedule), bucket_bytes=20_000, block_size=64, **arguments)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=q)
    target = torch.randn(40, 10, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    data = torch.Generator().manual_seed(100 + hvd.rank())
    losses, levels_seen = [], set()
    for step in range(steps):
        inputs = torch.randn(32, 40, generator=data).to(DEVICE)
        optimizer.zero_grad()
        loss = (model(inputs) - inputs @ target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        levels_seen.add(q.controller.bits)
        if step % 3 == 2:
            q.controller.step({"loss": loss.item()}, epoch=step)
        if step % 20 == 19:
            assert same_on_all_ranks(model.parameters(), f"replicas{step}"), f"replicas differ after step {step}"
    q.check_replicas()
    return model, losses, levels_seen


def test_random_level_switches():
    model, losses, levels = train(200)
    assert len(levels) >= 8, "the switches did not happen"
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10]), "it does not train"


@pytest.mark.parametrize("bits", [0.25, 4, 32])
def test_nans_of_other_bits_on_each_rank_are_the_same_afterwards(bits, rank):
    """Rank 0's have no sign, the others' have one."""
    quantizer = DynamicQuantizer(bits)
    problem = Problem(compression=quantizer)
    wanted = problem.draw(seed=1)
    for each in wanted.values():
        each.view(-1)[::3] = torch.nan
        each.view(torch.int32).view(-1)[::3] |= 0 if rank == 0 else -(2**31)
    reduced = problem.reduce(wanted)
    problem.step()
    assert all(each.isnan().any() for each in reduced.values())
    quantizer.check_replicas()


def test_in_inference_mode_as_well():
    """Where people validate. An error would be one of Horovod's, after which an elastic job begins again."""
    model = torch.nn.Linear(40, 60).to(DEVICE)
    q = DynamicQuantizer(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), compression=q)
    hvd.broadcast_parameters(model.state_dict(), 0)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 40, device=DEVICE)).sum().backward()
        optimizer.step()
        with torch.inference_mode():
            q.controller.step({"accuracy": torch.ones(())})
            q.check_replicas()
            state = AllRanks(q).state_dict()
    with torch.inference_mode():
        AllRanks(q).load_state_dict(state)
    model(torch.ones(1, 40, device=DEVICE)).sum().backward()
    optimizer.step()
