"""Whatever training loop stock Horovod completes, in whatever order ranks do things and messages arrive, ours does too.

Ranks, Horovod's optimizer and the network are simulated (`hvd_dyncomp.simulate`); hypothesis makes up the
programs, and decides who goes on and what has arrived. A program that stock Horovod does not complete, because its
ranks wait for each other in a circle, is not asked of ours.
"""

from __future__ import annotations

import horovod.torch as hvd
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from simulated import SimulatedOptimizer, mean_of, noise, parameters, places

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Static
from hvd_dyncomp.simulate import Deadlock, InProcessTransport, World

pytestmark = pytest.mark.promise(
    "A loop that completes with stock Horovod also completes with compression, with correct means."
)

# Two models, each with small tensors and several buckets; sizes that are no multiple of a block.
MODELS = {
    "expert": {"expert.a": 200, "expert.b": 5, "expert.c": 130},
    "head": {"head.a": 3, "head.b": 333, "head.c": 64},
}
SHAPE = {"block_size": 64, "min_numel": 10, "bucket_bytes": 600}
SIZES = {name: size for sizes in MODELS.values() for name, size in sizes.items()}

# With many ranks few programs are completed by stock Horovod: that is no fault of a test.
ANY = {"deadline": None, "suppress_health_check": [HealthCheck.filter_too_much]}


@st.composite
def programs(draw, ranks: int) -> list[list[tuple]]:
    """Per rank and step, what it does: uses some parameters in some order, then steps both optimizers, logs a loss.

    Where there are many ranks, all but one do the latter in one order: otherwise hardly ever would all complete it.
    """
    steps = draw(st.integers(1, 3))
    then = st.permutations(["expert", "head", "loss"])
    common = [draw(then) for _ in range(steps)]
    odd = draw(st.integers(0, ranks))
    each = []
    for rank in range(ranks):
        program = []
        for step in range(steps):
            used = draw(st.permutations(sorted(SIZES)))[: draw(st.integers(0, len(SIZES)))]
            program.append((used, draw(then) if rank == odd or ranks <= 3 else common[step]))
        each.append(program)
    return each


def play(programs: list[list[tuple]], compress, transport: InProcessTransport) -> list[dict[str, torch.Tensor]]:
    """One rank's part; returns its gradients after every step."""
    models = {model: parameters(sizes) for model, sizes in MODELS.items()}
    optimizers = {model: SimulatedOptimizer(named, compress(transport), transport) for model, named in models.items()}
    seen = []
    for step, (used, then) in enumerate(programs[transport.rank]):
        for optimizer in optimizers.values():
            optimizer.zero_grad()
        for name in used:
            model = name.split(".")[0]
            gradient = noise(name, SIZES[name], transport.rank, step)
            optimizers[model].backward(models[model][name], gradient)
        for what in then:
            if what == "loss":
                transport.wait(transport.sum(torch.ones(1), f"loss.{step}"))
            else:
                optimizers[what].step()
        seen.append({name: p.grad.clone() for named in models.values() for name, p in named.items()})
    return seen


def quantizer(bits: int, **arguments):
    return lambda transport: DynamicQuantizer(Controller(Static(bits)), transport=transport, **SHAPE, **arguments)


def check(seen: list[list[dict]], programs: list[list[tuple]], bound: float) -> None:
    ranks = len(programs)
    for step in range(len(programs[0])):
        for name, size in SIZES.items():
            users = [rank for rank in range(ranks) if name in programs[rank][step][0]]
            expected = mean_of(name, size, step, users, ranks)
            got = [rank[step][name] for rank in seen]
            assert all(torch.equal(other, got[0]) for other in got), f"replicas differ in {name} at step {step}"
            assert (got[0] - expected).norm() <= bound * (1 + expected.norm()), f"{name} at step {step}"


def any_program(ranks: int, hosts: tuple[int, ...], data) -> None:
    """Ours completes what stock Horovod completes, and is right."""
    each = data.draw(programs(ranks))
    choices = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=40))
    try:
        stock = World(ranks).run(lambda transport: play(each, lambda t: hvd.Compression.none, transport))
    except Deadlock:
        assume(False)
    check(stock, each, bound=1e-5)
    bits = data.draw(st.sampled_from([1, 16, 32]))
    seen = World(ranks, choices, hosts).run(lambda transport: play(each, quantizer(bits), transport))
    # At 1 bit what has not arrived is still owed, and may be more than a step's gradient.
    check(seen, each, bound={1: 5.0, 16: 2e-3, 32: 1e-5}[bits])


@places("2", "3")
@settings(max_examples=150, **ANY)
@given(data=st.data())
def test_any_program_that_stock_horovod_completes(ranks, hosts, data):
    any_program(ranks, hosts, data)


@pytest.mark.thorough
@places("2x2", "2x2 dealt", "2+1")
@settings(max_examples=80, **ANY)
@given(data=st.data())
def test_any_program_on_hosts_of_several_workers(ranks, hosts, data):
    any_program(ranks, hosts, data)


@pytest.mark.thorough
@places("3x2")
@settings(max_examples=25, **ANY)
@given(data=st.data())
def test_any_program_on_three_hosts(ranks, hosts, data):
    any_program(ranks, hosts, data)


@pytest.mark.promise("Loading a state during a run gives the correct state, or an error on every rank.")
@places("2", "3", "2x2")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_state_loaded_by_some_ranks_in_mid_run(ranks, hosts, data):
    """By all, or one that is as far as the others: right. Otherwise every rank hears of it.

    At 32 bits nothing but the handshake can tell.
    """
    bits = data.draw(st.sampled_from([16, 32]))
    loaders = data.draw(st.sets(st.integers(0, ranks - 1), min_size=1))
    stale = data.draw(st.booleans())
    choices = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=40))

    def program(transport: InProcessTransport):
        named = parameters(MODELS["expert"])
        q = quantizer(bits)(transport)
        optimizer = SimulatedOptimizer(named, q, transport)
        states = []
        for step in range(3):
            states.append(q.state_dict())
            if step == 2 and transport.rank in loaders:
                q.load_state_dict(states[1 if stale else 2])
            optimizer.zero_grad()
            for name, p in named.items():
                optimizer.backward(p, noise(name, p.numel(), transport.rank, step))
            try:
                optimizer.step()
            except LockstepError as error:
                return str(error)
        return {name: p.grad for name, p in named.items()}

    results = World(ranks, choices, hosts).run(program)
    if stale and len(loaders) < ranks:
        odd = min(loaders) if 0 not in loaders else min(set(range(ranks)) - loaders)
        assert len(set(results)) == 1 and f"rank {odd} has" in results[0] and "step" in results[0], results
        return
    for name, size in MODELS["expert"].items():
        expected = mean_of(name, size, 2, range(ranks), ranks)
        assert all((result[name] - expected).norm() <= 2e-3 * expected.norm() for result in results)
        assert all(torch.equal(result[name], results[0][name]) for result in results)
