"""One rank is late: the others say for what they wait, and what comes out is right."""

import time

import horovod.torch as hvd
import pytest
from problem import Problem, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Static

LATE = 7.0  # seconds; tests/on_horovod/test_stall.py has Horovod complain after 2


def late_at_gradient(problem: Problem, number: int) -> None:
    """Has this rank sleep before its `number`-th gradient from now."""
    left = [number]

    def hook(gradient):
        left[0] -= 1
        if left[0] == 0:
            time.sleep(LATE)

    for parameter in problem.parameters.values():
        parameter.register_hook(hook)


@pytest.mark.parametrize(("gradient", "waits_for"), [(1, "handshake"), (2, "exchange")])
def test_a_late_rank(gradient, waits_for, rank, size, capfd):
    prefix = f"{waits_for}."
    problem = Problem(names=["long", "matrix"], prefix=prefix, compression=DynamicQuantizer(Controller(Static(16))))
    problem.reduce(problem.draw(seed=1))
    wanted = problem.draw(seed=2)
    if rank == 1:
        late_at_gradient(problem, gradient)
    for name, got in problem.reduce(wanted).items():
        mean = hvd.allreduce(wanted[name], name=f"mean.{name}")
        assert (got - mean).norm() <= 1e-3 * mean.norm()
        assert same_on_all_ranks([got], f"got.{name}")
    if rank == 0:  # which is the one that complains
        said = capfd.readouterr().err
        names = {
            "handshake": f"{prefix}long.handshake",
            "exchange": f"{prefix}long.{prefix}matrix.{'pair' if size == 2 else 'scatter'}",
        }
        assert "Missing ranks" in said
        assert f"hvd_dyncomp.{names[waits_for]}" in said, said
