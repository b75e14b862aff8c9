"""Where ranks are decides how they exchange, and what they saved is at home in other places."""

import copy

import pytest
import torch
from simulated import (
    BY_HOST,
    Worker,
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
def test_in_other_places_residuals_of_a_loaded_state_begin_at_zero(ranks, hosts, caplog):
    """If the exchange is divided by host. A run on the same hosts repeats the uninterrupted one."""

    def indebted(worker: Worker):
        worker.step(worker.noise(0))
        state = copy.deepcopy(worker.quantizer.state_dict())
        return state, worker.step(worker.noise(1))

    before, _ = on_ranks(ranks, indebted, SIZES, 4, hosts=hosts)

    def program(worker: Worker, loads: bool):
        worker.quantizer.attach(worker.optimizer)
        state = before[worker.transport.rank][0]
        empty = {"residuals": {}, "shard_residuals": {}}
        worker.quantizer.load_state_dict(state if loads else {**state, **empty})
        return worker.step(worker.noise(1))

    again, _ = on_ranks(ranks, lambda worker: program(worker, True), SIZES, 4, hosts=hosts)
    for (_, expected), got in zip(before, again, strict=True):
        assert all(torch.equal(got[name], expected[name]) for name in SIZES)
    for there in ([rank % 2 for rank in range(ranks)], [0] * (ranks - 1) + [1], list(range(ranks))):
        caplog.clear()
        loaded, _ = on_ranks(ranks, lambda worker: program(worker, True), SIZES, 4, hosts=there)
        fresh, _ = on_ranks(ranks, lambda worker: program(worker, False), SIZES, 4, hosts=there)
        for one, other in zip(loaded, fresh, strict=True):
            assert all(torch.equal(one[name], other[name]) for name in SIZES)
        assert caplog.text.count("residuals begin at zero") == 1
