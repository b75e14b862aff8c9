"""Every rank takes the level that rank 0 found fastest, in the same step."""

from types import SimpleNamespace

import horovod.torch as hvd
import pytest
from problem import Problem, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule, step_levels
from hvd_dyncomp.levels import UNCOMPRESSED


@pytest.mark.parametrize("fast", [4, UNCOMPRESSED])
def test_all_ranks_settle_on_what_is_fast_on_rank_0(fast, rank, request, monkeypatch):
    # Clocks of the test's own: how long a step takes here is the machine's business. The others' contradict rank 0's,
    # since they are not to be asked.
    now = 0.0
    monkeypatch.setattr(step_levels, "time", SimpleNamespace(monotonic=lambda: now))
    q = DynamicQuantizer(Controller(Schedule({0: 4, 1: 2})), auto_level=True, bucket_bytes=30_000)
    problem = Problem(names=["long", "odd", "bias"], prefix=request.node.name, compression=q)
    levels, reduced = [], {}
    for step in range(80):
        reduced = problem.reduce(problem.draw(seed=step))
        levels.append(q.bits)
        now += 1.0 if (q.bits == fast) == (rank == 0) else 1.2
    everyone = hvd.allgather_object(levels, name="levels")
    assert all(other == levels for other in everyone)
    assert set(levels) == {4, 8, fast}
    assert set(levels[60:]) == {fast}
    assert same_on_all_ranks(reduced.values(), "reduced")
    assert {bits for _, bits in q.meter.records} == set(levels)
    q.controller.step({})
    problem.reduce(problem.draw(seed=99))
    assert q.bits == 2, "the controller has moved, and its level is tried first"
