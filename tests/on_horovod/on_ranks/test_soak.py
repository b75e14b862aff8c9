"""20,000 steps with whatever may happen in them."""

import random

import horovod.torch as hvd
import psutil
import pytest
from problem import Problem, same_on_all_ranks

from hvd_dyncomp import LEVELS, Controller, DynamicQuantizer, Schedule

pytestmark = pytest.mark.promise("All replicas are equal bit for bit, also when the level changes.")

STEPS = 20_000
EPOCH = 100  # steps between switches of the level
CHECK = 500
WARM = 4_000  # steps until everything has been allocated that ever will be


def test_20000_steps(rank):
    chance = random.Random(1)  # the same on all ranks
    schedule = {epoch: chance.choice(LEVELS) for epoch in range(STEPS // EPOCH)}
    quantizer = DynamicQuantizer(Controller(Schedule(schedule)), bucket_bytes=30_000)
    problem = Problem(compression=quantizer)
    own = random.Random(rank)  # other ones on every rank
    names = list(problem.parameters)
    wanted = [problem.draw(seed=seed) for seed in range(20)]
    sizes = []
    for step in range(STEPS):
        used = own.sample(names, own.randint(0, len(names)))
        problem.reduce(wanted[step % len(wanted)], used)
        problem.step()
        if (step + 1) % CHECK == 0:
            assert same_on_all_ranks(problem.parameters.values(), f"parameters.{step}"), step
            sizes.append(psutil.Process().memory_info().rss)
        if (step + 1) % EPOCH == 0:
            quantizer.controller.step({})
    grown = (sizes[-1] - sizes[WARM // CHECK - 1]) / 1e6
    print(f"rank {rank}: {STEPS} steps, memory grew by {grown:.1f} MB after the first {WARM}", flush=True)
    # Horovod alone grows as well (it remembers the names of what it has seen); bytes a step would be more than this.
    assert grown < 8, [size / 1e6 for size in sizes]
    assert len({bits for _, bits in quantizer.meter.records}) == len(LEVELS)
    hvd.barrier()
