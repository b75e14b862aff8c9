"""Where ranks are decides how they exchange, and what they saved is at home in other places."""

import pytest
import torch
from simulated import (
    BY_HOST,
    Worker,
    mean_of,
    on_ranks,
)

from hvd_dyncomp import LockstepError
from hvd_dyncomp.simulate import World

SIZES = {"a": 130, "b": 500, "small": 5}


@pytest.mark.parametrize("hierarchical", [None, False])
def test_uneven_hosts_are_said_once_in_the_log(hierarchical, caplog):
    on_ranks(3, lambda w: [w.step(w.noise(s)) for s in range(2)], SIZES, 4, hosts=(0, 0, 1), hierarchical=hierarchical)
    said = "hosts have different numbers of workers (2, 1), so gradients are exchanged among all workers at once"
    assert caplog.text.count(said) == (hierarchical is None)


def test_ranks_that_want_different_ways_say_so():
    def program(transport) -> str:
        worker = Worker(transport, SIZES, 4, hierarchical=False if transport.rank == 3 else None)
        with pytest.raises(LockstepError) as caught:
            worker.step(worker.noise(0))
        return str(caught.value)

    texts = World(4, hosts=(0, 0, 1, 1)).run(program)
    assert len(set(texts)) == 1 and "rank 0 has hierarchical None, rank 3 has False" in texts[0]


@BY_HOST
@pytest.mark.parametrize("levels", [(16,), (2, 32), (32, 32), (32, 2, 32)])
def test_a_state_that_all_load_is_at_home_in_other_places(ranks, hosts, levels):
    """What was owed in one placement arrives in another: in a step at 32 bits, or at 16, all of it."""
    sizes = {"a": 130, "b": 500}

    def indebted(worker: Worker):
        delivered = [torch.cat(list(worker.step(worker.noise(step)).values())) for step in range(3)]
        return worker.quantizer.state_dict(), sum(delivered)

    before, _ = on_ranks(ranks, indebted, sizes, 4, hosts=hosts, bucket_bytes=1)

    def program(worker: Worker):
        worker.quantizer.load_state_dict(before[worker.transport.rank][0])
        delivered = torch.zeros(630)
        for step, level in enumerate(levels, 3):
            worker.set_level(level)
            gradients = worker.noise(step)
            worker.backward({"b": gradients["b"]})
            worker.barrier(f"{step}: it is known where the ranks are")
            worker.optimizer.backward(worker.parameters["a"], gradients["a"])
            worker.optimizer.step()
            delivered += torch.cat([p.grad for p in worker.parameters.values()])
        return delivered

    steps = range(3 + len(levels))
    expected = torch.cat(
        [sum(mean_of(name, size, step, range(ranks), ranks) for step in steps) for name, size in sizes.items()]
    )
    for there in ([rank % 2 for rank in range(ranks)], [0] * (ranks - 1) + [1], list(range(ranks))):
        after, _ = on_ranks(ranks, program, sizes, 4, hosts=there, choices=[0], bucket_bytes=1)
        for (_, delivered), got in zip(before, after, strict=True):
            # In four steps at most, a value loses a 512th of itself as bfloat16.
            assert (delivered + got - expected).norm() <= 4e-3 * expected.norm()
            assert torch.equal(got, after[0])
