"""One rank is late: the others say for what they wait, and what comes out is right."""

import time

import horovod.torch as hvd
from problem import Problem, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Static

LATE = 7.0  # seconds; tests/parallel/test_stall.py has Horovod complain after 2


def test_a_late_rank(rank, size, capfd):
    problem = Problem(names=["long", "matrix"], compression=DynamicQuantizer(Controller(Static(16))))
    problem.reduce(problem.draw(seed=1))
    wanted = problem.draw(seed=2)
    if rank == 1:
        time.sleep(LATE)
    for name, got in problem.reduce(wanted).items():
        mean = hvd.allreduce(wanted[name], name=f"mean.{name}")
        assert (got - mean).norm() <= 1e-3 * mean.norm()
        assert same_on_all_ranks([got], f"got.{name}")
    if rank == 0:  # which is the one that complains
        said = capfd.readouterr().err
        assert "Missing ranks" in said
        for name in ("long.handshake", "matrix.whole" if size == 2 else "matrix.scatter"):
            assert f"hvd_dyncomp.{name}" in said, said
