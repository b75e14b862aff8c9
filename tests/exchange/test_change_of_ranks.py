"""Ranks come and go: with `hvd.elastic` a process may have another rank, among others, from one step to the next."""

import pytest
import torch
from simulated import Worker, noise, on_ranks

from hvd_dyncomp.simulate import World

SIZES = {"a": 130, "b": 500}


def owed(state: dict) -> torch.Tensor:
    """What a rank's residuals will add to the result, by value of the bucket, in which "b" comes first."""
    total = torch.zeros(640)
    total[:630] = torch.cat([state["residuals"]["b"], state["residuals"]["a"]])
    shard = state["shard_residuals"]["b"]
    total[shard["first"] : shard["first"] + len(shard["values"])] += shard["values"]
    return state["factor"] * total


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
def test_the_quantizer_sees_by_itself_that_ranks_are_others(before, after, hosts):
    """And wherever they are: what each owes is neither more nor less."""
    results = regrouped(before, after, hosts)
    for rank, (old, bound, got) in enumerate(results):
        assert (bound["rank"], bound["world_size"], bound["factor"]) == (rank, len(after), 1 / len(after))
        torch.testing.assert_close(owed(bound), owed(old), rtol=2**-8, atol=1e-7)  # rounded once more
        assert owed(old).abs().sum() > 1
        assert all(torch.equal(got[name], results[0][2][name]) for name in SIZES)


@pytest.mark.parametrize("ranks", [2, 3])
def test_files_per_rank_of_more_ranks_lose_what_the_others_had(ranks, caplog):
    def a_step(worker: Worker) -> dict:
        worker.step(worker.noise(0))
        return worker.quantizer.state_dict()

    states, _ = on_ranks(3, a_step, SIZES, 2)

    def loaded(worker: Worker) -> None:
        worker.quantizer.load_state_dict(states[worker.transport.rank])
        worker.step(worker.noise(1))

    caplog.clear()
    on_ranks(ranks, loaded, SIZES, 2)
    said = [record.args[:2] for record in caplog.records if "residuals of the ranks " in record.msg]
    assert sorted(said) == ([(0, 3), (1, 3)] if ranks == 2 else [])


@pytest.mark.parametrize("loaded", [False, True])
def test_who_joins_begins_where_rank_0_is(loaded):
    """Also who has gone back to a state before, as after a reset."""

    def program(worker: Worker):
        if loaded:
            worker.quantizer.load_state_dict(worker.quantizer.state_dict())
        if worker.transport.rank == 0:
            worker.quantizer._levels.steps = 41
        worker.quantizer.sync()
        state = worker.quantizer.state_dict()
        worker.step({name: noise(name, size, worker.transport.rank, 0) for name, size in SIZES.items()})
        return state["steps"], worker.quantizer.state_dict()["steps"]

    results, _ = on_ranks(2, program, SIZES, 4)
    assert results == [(41, 42)] * 2


def test_after_sync_what_is_owed_is_the_process_own_whatever_its_rank():
    def program(worker: Worker):
        worker.step(worker.noise(0))
        before = worker.quantizer.state_dict()
        worker.quantizer.sync()
        after = worker.quantizer.state_dict()
        assert all(torch.equal(after["residuals"][name], before["residuals"][name]) for name in SIZES)
        return before["rank"], after["rank"]

    results, _ = on_ranks(2, program, SIZES, 4)
    assert results == [(0, None), (1, None)]
