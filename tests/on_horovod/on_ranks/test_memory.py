"""Memory stays as it is however long a run lasts."""

import random

import psutil
import pytest
from problem import Problem

from hvd_dyncomp import LEVELS, Controller, DynamicQuantizer, Schedule

pytestmark = pytest.mark.promise("Memory use does not grow during training; one tensor may have 200 million values.")


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_no_growth_over_500_steps():
    levels = random.Random(1)
    q = DynamicQuantizer(Controller(Schedule({epoch: levels.choice(LEVELS) for epoch in range(60)})))
    problem = Problem(names=["large", "conv", "bias"], compression=q)
    wanted = problem.draw(seed=1)
    at = {}
    for step in range(700):
        problem.reduce(wanted)
        if step % 12 == 11:
            q.controller.step({})
        if step in (199, 699):
            at[step] = resident_bytes()
    # One message of 4 bits kept per step would be 12 MB; the history of 41 epochs is some kilobytes.
    print(f"grown by {(at[699] - at[199]) / 1e6:.2f} MB in 500 steps")
    assert at[699] - at[199] < 4e6
