"""Ranks come and go: with `hvd.elastic` a process may have another rank, among others, from one step to the next."""

import pytest
import torch
from simulated import Worker, noise, on_ranks

from hvd_dyncomp.simulate import World

SIZES = {"a": 130, "b": 500}


def regrouped(before: list[int], after: list[int], hosts: list[int]) -> list[tuple[dict, dict, dict]]:
    """Two steps on ranks of these hosts, then one of those in `after` alone, in that order and on these hosts.

    Per rank: its state before, its state once it has seen that it is another, and the reduced gradients.
    """

    def first(worker: Worker) -> Worker:
        for step in range(2):
            worker.step(worker.noise(step))
        return worker

    workers, _ = on_ranks(len(before), first, SIZES, 2, hosts=before)
    states = [workers[old].quantizer.state_dict() for old in after]
    world = World(len(after), hosts=hosts)
    for rank, old in enumerate(after):
        worker = workers[old]
        worker.transport._world, worker.transport._rank = world, rank

    def second(transport):
        worker = workers[after[transport.rank]]
        gradients = worker.noise(2)
        got = worker.step(gradients)  # by Horovod, uncompressed
        return worker.quantizer._plan.residuals(), got

    return [(state, *seen) for state, seen in zip(states, world.run(second), strict=True)]


APART, PAIRS = [0, 1, 2], [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("before", "after", "hosts"),
    [
        (APART, [2, 0], [0, 1]),
        (APART, [1, 2, 0], [0, 1, 2]),
        (APART, [2, 0], [0, 0]),
        (PAIRS, [3, 1], [0, 1]),  # each host has lost one
        (PAIRS, [0, 3, 1], [0, 1, 0]),  # one has, so that they are uneven
        (PAIRS, [3, 2, 1, 0], PAIRS),
        (PAIRS, [1, 2, 3, 0], [0, 1, 0, 1]),
        (PAIRS, [0, 1], [0, 0]),
        ([0, 0, 1, 1, 2, 2], [1, 0, 4, 5], PAIRS),
        ([0, 0, 1, 1, 2, 2], [5, 3, 1], APART),
    ],
)
def test_the_quantizer_sees_by_itself_that_ranks_are_others(before, after, hosts, caplog):
    """And begins with residuals of zero."""
    results = regrouped(before, after, hosts)
    for rank, (old, bound, got) in enumerate(results):
        assert (bound["rank"], bound["world_size"]) == (rank, len(after))
        assert any(residual.any() for residual in residuals(old)) and not any(each.any() for each in residuals(bound))
        assert all(torch.equal(got[name], results[0][2][name]) for name in SIZES)
    assert caplog.text.count("residuals begin at zero") == 1


def residuals(state: dict) -> list[torch.Tensor]:
    return [*state["residuals"].values(), *(shard["values"] for shard in state["shard_residuals"].values())]


@pytest.mark.parametrize("ranks", [2, 3])
def test_files_of_another_number_of_ranks_bring_no_residuals(ranks, caplog):
    def a_step(worker: Worker) -> dict:
        worker.step(worker.noise(0))
        return worker.quantizer.state_dict()

    states, _ = on_ranks(3, a_step, SIZES, 2)

    def loaded(worker: Worker) -> dict:
        worker.quantizer.load_state_dict(states[worker.transport.rank])
        worker.quantizer.attach(worker.optimizer)
        return worker.quantizer.state_dict()

    caplog.clear()
    found, _ = on_ranks(ranks, loaded, SIZES, 2)
    for mine, saved in zip(found, states, strict=False):
        if ranks == 3:
            assert all(map(torch.equal, residuals(mine), residuals(saved)))
        else:
            assert not any(each.any() for each in residuals(mine))
        assert mine["steps"] == 1
    assert caplog.text.count("residuals begin at zero") == (ranks == 2)


@pytest.mark.parametrize("loaded", [False, True])
def test_who_joins_begins_where_rank_0_is(loaded):
    """Also who has gone back to a state before, as after a reset."""

    def program(worker: Worker):
        if loaded:
            worker.quantizer.load_state_dict(worker.quantizer.state_dict())
        if worker.transport.rank == 0:
            worker.quantizer._steps = 41
        worker.quantizer.sync()
        state = worker.quantizer.state_dict()
        worker.step({name: noise(name, size, worker.transport.rank, 0) for name, size in SIZES.items()})
        return state["steps"], worker.quantizer.state_dict()["steps"]

    results, _ = on_ranks(2, program, SIZES, 4)
    assert results == [(41, 42)] * 2


@pytest.mark.parametrize("changes", [False, True])
def test_residuals_stay_through_a_sync_if_all_ranks_are_the_same(changes, caplog):
    """Otherwise they begin at zero on all of them: here one rank has come anew."""

    def program(worker: Worker):
        worker.step(worker.noise(0))
        before = worker.quantizer.state_dict()
        if changes and worker.transport.rank == 1:
            worker.quantizer._saved = worker.quantizer._plan = None
        worker.quantizer.sync()
        worker.quantizer.attach(worker.optimizer)
        return before, worker.quantizer.state_dict()

    results, _ = on_ranks(2, program, SIZES, 4)
    for before, after in results:
        if changes:
            assert not any(each.any() for each in residuals(after))
        else:
            assert all(map(torch.equal, residuals(after), residuals(before)))
    assert caplog.text.count("residuals begin at zero") == changes
