"""Rank 0 proposes a level, and all follow it in the same step."""

import pytest
from simulated import Clock, Worker, on_ranks, places

SIZES = {"a": 130}


@places("2", "3", "2x2")
@pytest.mark.parametrize("fast", [4, 32])
def test_all_ranks_follow_rank_0(ranks, hosts, fast, monkeypatch):
    """Time passes at the other levels, on rank 0; the other ranks have measured something else."""

    clock = Clock()
    monkeypatch.setattr("hvd_dyncomp.step_levels.time", clock)

    def program(worker: Worker) -> list[int]:
        levels = []
        for step in range(80):
            worker.step(worker.noise(step))
            levels.append(worker.quantizer.bits)
            if worker.transport.rank == 0:
                clock.now += 1.0 if worker.quantizer.bits == fast else 2.0
            worker.barrier(str(step))
        return levels

    results, _ = on_ranks(ranks, program, SIZES, 4, auto_level=True, hosts=hosts)
    assert all(levels == results[0] for levels in results)
    assert set(results[0]) == {4, 8, fast} and set(results[0][60:]) == {fast}
