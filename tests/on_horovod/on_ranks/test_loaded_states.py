"""A quantizer's state that is loaded in the middle of a run: by all ranks, or by one.

What one rank does, the others cannot know when they begin the next step. Either the result is right, or every rank says
what is wrong; none waits for another.
"""

from __future__ import annotations

import copy

import horovod.torch as hvd
import pytest
import torch
from problem import Problem, ours, same_on_all_ranks

from hvd_dyncomp import LockstepError

pytestmark = [
    pytest.mark.promise("A state loaded during a run is right, or an error on every rank."),
    pytest.mark.timeout(60, method="thread"),
]
everywhere = pytest.mark.parametrize("bits", [4, 32])


@pytest.fixture(params=["first", "last"])
def loader(request, size) -> int:
    """The rank that loads."""
    return 0 if request.param == "first" else size - 1


class Run:
    """A problem whose gradients do not depend on what has been made of earlier ones."""

    def __init__(self, bits: int, prefix: str) -> None:
        self.quantizer = ours(bits, bucket_bytes=8192)()
        self.problem = Problem(prefix=f"{prefix}.", compression=self.quantizer)

    def steps(self, *seeds: int) -> dict[str, torch.Tensor]:
        for seed in seeds:
            reduced = self.problem.reduce(self.problem.draw(seed))
        return reduced


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bits: int) -> None:
    for name, mean in expected.items():
        if bits < 32:
            assert torch.equal(got[name], mean), name
        else:  # Horovod's own sums depend on what happened to be fused with what
            torch.testing.assert_close(got[name], mean, rtol=1e-5, atol=1e-6)


@everywhere
def test_one_rank_loads_what_it_has_just_saved(bits, loader, rank, request):
    untouched, run = Run(bits, f"{request.node.name}.untouched"), Run(bits, request.node.name)
    for seed in range(6):
        # Before the first step there is nothing to load; then before some steps, and before two in a row.
        if rank == loader and seed in (1, 2, 4):
            run.quantizer.load_state_dict(copy.deepcopy(run.quantizer.state_dict()))
        got = run.steps(seed)
        assert_same(got, untouched.steps(seed), bits)
        assert same_on_all_ranks(got.values(), f"{request.node.name}.{seed}")


@everywhere
def test_the_ranks_load_one_after_the_other(bits, rank, size, request):
    untouched, run = Run(bits, f"{request.node.name}.untouched"), Run(bits, request.node.name)
    for seed in range(size + 2):
        if rank == seed - 1:
            run.quantizer.load_state_dict(copy.deepcopy(run.quantizer.state_dict()))
        assert_same(run.steps(seed), untouched.steps(seed), bits)


@everywhere
def test_one_rank_loads_the_state_of_another_step(bits, loader, rank, request):
    run = Run(bits, request.node.name)
    run.steps(0)
    saved = copy.deepcopy(run.quantizer.state_dict())
    run.steps(1, 2)
    if rank == loader:
        run.quantizer.load_state_dict(saved)
    with pytest.raises(LockstepError, match="step"):
        run.steps(3)
    assert torch.equal(hvd.allreduce(torch.ones(1), name="still alive"), torch.ones(1))


@everywhere
def test_all_ranks_go_back_to_an_earlier_state(bits, request):
    """What comes next is what came next at the time, bit by bit: residuals and step number are those of then."""
    run = Run(bits, request.node.name)
    run.steps(0, 1)
    saved = copy.deepcopy(run.quantizer.state_dict())
    then = run.steps(2)
    run.steps(3, 4)
    run.quantizer.load_state_dict(saved)
    now = run.steps(2)
    assert_same(now, then, bits)
    assert same_on_all_ranks(now.values(), request.node.name)
