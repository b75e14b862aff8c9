"""What a user can choose about which gradients are compressed, and how the others travel."""

import time

import horovod.torch as hvd
import pytest
import torch
from problem import Problem, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Static


def reduced(request, names=("long", "odd", "bias"), steps=1, **arguments):
    """The quantizer, the last step's means and the exact ones."""
    quantizer = DynamicQuantizer(Controller(Static(4)), **arguments)
    problem = Problem(names=list(names), prefix=f"{request.node.name}.", compression=quantizer)
    for step in range(steps):
        wanted = problem.draw(seed=step)
        got = problem.reduce(wanted)
    exact = {name: hvd.allreduce(wanted[name].double(), name=f"exact.{name}") for name in wanted}
    assert same_on_all_ranks(got.values(), "got")
    return quantizer, got, exact


def error(got, exact):
    return ((got.double() - exact).norm() / exact.norm()).item()


def test_what_is_skipped_arrives_exactly(request):
    skip = lambda name, parameter: name.endswith("odd") and parameter.numel() == 1031  # noqa: E731
    quantizer, got, exact = reduced(request, skip=skip)
    assert error(got["odd"], exact["odd"]) < 1e-6 < 1e-2 < error(got["long"], exact["long"])


def test_attached_before_the_first_gradient(request):
    quantizer = DynamicQuantizer(Controller(Static(16)))
    problem = Problem(names=["long", "bias"], prefix=f"{request.node.name}.", compression=quantizer)
    quantizer.attach(problem.optimizer)
    assert quantizer.state_dict()["world_size"] == hvd.size(), "it knows its optimizer"
    for step in range(2):
        wanted = problem.draw(seed=step)
        got = problem.reduce(wanted)
        exact = hvd.allreduce(wanted["long"].double(), name=f"exact.{step}")
        assert error(got["long"], exact) < 1e-3
    # Again in mid-run: what it owes goes over.
    before = quantizer.state_dict()["residuals"]
    quantizer.attach(problem.optimizer)
    after = quantizer.state_dict()["residuals"]
    assert before[f"{request.node.name}.long"].any()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("bits", [4, 32])
def test_who_waits_for_a_slow_rank_is_blocked_and_the_slow_rank_is_not(bits, late, request):
    """Rank 0 sleeps before its first gradient, so that others wait for its greeting; or before its last one, for which
    at 32 bits Horovod waits.
    """
    quantizer = DynamicQuantizer(bits)
    problem = Problem(names=["long", "odd", "bias"], prefix=f"{request.node.name}.", compression=quantizer)
    seen, waited = [], []

    def on_gradient(gradient: torch.Tensor) -> None:
        if hvd.rank() == 0 and len(seen) % 3 == late:
            time.sleep(0.6)
        seen.append(gradient)

    for parameter in problem.parameters.values():
        parameter.register_hook(on_gradient)
    for step in range(3):
        wanted, before = problem.draw(seed=step), quantizer.meter.total().waited_seconds
        hvd.allreduce(torch.zeros(1), name=f"{request.node.name}.together.{step}")
        began = time.perf_counter()
        problem.reduce(wanted)
        waited.append(quantizer.meter.total().waited_seconds - before)
        assert waited[-1] <= time.perf_counter() - began
    assert max(waited) < 0.3 if hvd.rank() == 0 else min(waited) > 0.3
