"""Gradients in memory that others own: other parameters, the program, or a backward pass that has yet to read it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import SimulatedOptimizer, places

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule
from hvd_dyncomp.exchange import memory
from hvd_dyncomp.exchange.memory import are_sole_owners, overlapping
from hvd_dyncomp.simulate import InProcessTransport, World

pytestmark = pytest.mark.promise("Gradients may share memory; other contents of that memory do not change.")

SIZES = {"a": 64, "b": 40, "c": 130, "d": 64, "skipped": 64}
LENGTH = 200  # of the memory that gradients are cut from
STEPS = 3


@st.composite
def programs(draw) -> list[list[tuple[str, int, int]]]:
    """A rank's steps: which gradients come in which order, and where in which memory each lies."""
    names = st.permutations(sorted(SIZES))

    def step() -> list[tuple[str, int, int]]:
        used = draw(names)[: draw(st.integers(1, len(SIZES)))]
        starts = [draw(st.sampled_from([0, 0, 10, LENGTH - SIZES[name]])) for name in used]
        return [
            (name, draw(st.integers(0, 1)), min(s, LENGTH - SIZES[name])) for name, s in zip(used, starts, strict=True)
        ]

    return [step() for _ in range(STEPS)]


def values(rank: int, step: int) -> list[torch.Tensor]:
    """What backward has left in memory."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(LENGTH, generator=generator) for _ in range(2)]


def play(program: list[list[tuple[str, int, int]]], transport: InProcessTransport, levels: dict[int, float]):
    """One rank's part; returns its means after every step."""
    named = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in SIZES.items()}
    controller = Controller(Schedule(levels), transport=transport)
    quantizer = DynamicQuantizer(
        controller,
        transport=transport,
        block_size=64,
        min_numel=10,
        bucket_bytes=300,
        skip=lambda name, parameter: name == "skipped",
    )
    optimizer = SimulatedOptimizer(named, quantizer, transport)
    seen = []
    for step, used in enumerate(program):
        optimizer.zero_grad()
        owned = values(transport.rank, step)
        before = [each.clone() for each in owned]
        gradients = {name: owned[which][start : start + SIZES[name]] for name, which, start in used}
        for name in [name for name, _, _ in used]:
            optimizer.hand_over(named[name], gradients[name])
            transport.yield_cpu()
        for each, was in zip(owned, before, strict=True):
            assert torch.equal(each, was), "a mean was written while backward could still read the memory"
        optimizer.synchronize()
        for name, gradient in gradients.items():
            alone = all(other == name or not overlapping([gradient, gradients[other]]) for other in gradients)
            if alone:  # so what else the program has in this memory is as if nobody had exchanged anything
                assert named[name].grad.data_ptr() == gradient.data_ptr()
        seen.append({name: p.grad.clone() for name, p in named.items()})
        optimizer.step()
        controller.step({})
    return seen


def check(seen, programs, bound: float) -> None:
    for step in range(STEPS):
        for name, size in SIZES.items():
            expected = torch.zeros(size)
            for rank, program in enumerate(programs):
                for used, which, start in program[step]:
                    if used == name:
                        expected += values(rank, step)[which][start : start + size] / len(programs)
            got = [rank[step][name] for rank in seen]
            assert all(torch.equal(other, got[0]) for other in got), f"replicas differ in {name} at step {step}"
            assert (got[0] - expected).norm() <= bound * (1 + expected.norm()), f"{name} at step {step}"


@places("2", "3", "2x2")
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_overlap_gives_the_right_means(ranks, hosts, data):
    """Compressed, skipped, and at 32 bits in the step that delivers residuals; whatever ranks share or do not."""
    each = [data.draw(programs()) for _ in range(ranks)]
    choices = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=40))
    first, bound = data.draw(st.sampled_from([(1, 5.0), (16, 2e-3)]))
    levels = {0: first, STEPS - 1: 32}
    seen = World(ranks, choices, hosts).run(lambda transport: play(each[transport.rank], transport, levels))
    check(seen, each, bound)


@places("2", "3", "2x2")
@settings(max_examples=40, deadline=None)
@given(choices=st.lists(st.integers(0, 11), min_size=1, max_size=40))
def test_means_that_are_reduced_again_may_share_memory(ranks, hosts, choices):
    """In two buckets, on one rank only: none is written before the other has been read, nor over the other's mean."""

    def program(transport) -> list[torch.Tensor]:
        named = {name: torch.nn.Parameter(torch.zeros(64)) for name in "ab"}
        quantizer = DynamicQuantizer(4, transport=transport, min_numel=10, bucket_bytes=1)
        optimizer = SimulatedOptimizer(named, quantizer, transport)
        for parameter in named.values():
            optimizer.hand_over(parameter, torch.ones(64))
        optimizer.synchronize()
        for parameter, gradient in zip(named.values(), gradients(transport.rank), strict=True):
            parameter.grad = gradient
        optimizer.synchronize()
        return [parameter.grad for parameter in named.values()]

    def gradients(rank: int) -> list[torch.Tensor]:
        own = values(rank, 0)
        return [own[0][:64], own[1 if rank else 0][:64].view(-1)]

    expected = [sum(each) / ranks for each in zip(*map(gradients, range(ranks)), strict=True)]
    for means in World(ranks, choices, hosts).run(program):
        for mean, right in zip(means, expected, strict=True):
            torch.testing.assert_close(mean, right)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_overlaps_are_found_to_the_element(data):
    base = torch.zeros(6, 8)
    kinds = {
        "rows": lambda i, n: base[i : i + n],
        "columns": lambda i, n: base[:, i : i + n],
        "transposed": lambda i, n: base.t()[i : i + n],
        "strided": lambda i, n: base.view(-1)[i :: n + 1],
    }
    drawn = st.tuples(st.sampled_from(sorted(kinds)), st.integers(0, 4), st.integers(1, 3))
    tensors = [kinds[kind](i, n) for kind, i, n in data.draw(st.lists(drawn, max_size=6))]
    taken: set[int] = set()
    expected = []
    for number, tensor in enumerate(tensors):
        places = torch.arange(48).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        own = set(places.flatten().tolist())
        if own & taken:
            expected.append(number)
        else:
            taken |= own
    assert overlapping(tensors) == expected


def test_means_are_written_early_only_where_nobody_else_owns_the_memory(monkeypatch):
    whole = torch.zeros(8)
    assert are_sole_owners([whole])
    part = whole[:4].detach()
    assert not are_sole_owners([part]) and not are_sole_owners([whole])
    del whole
    assert are_sole_owners([part])
    monkeypatch.setattr(memory, "_owners", None)  # a torch that does not tell
    assert not are_sole_owners([part])


def test_backward_leaves_gradients_that_nobody_else_owns():
    """So in ordinary models no mean has to wait for the end of a step, and no gradient is copied."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3),
        torch.nn.BatchNorm2d(8),
        torch.nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last),
        torch.nn.Flatten(2),
        torch.nn.Linear(16, 32),
        torch.nn.TransformerEncoderLayer(32, 2, 32),
    )
    model(torch.randn(2, 3, 8, 8)).square().mean().backward()
    assert are_sole_owners([parameter.grad for parameter in model.parameters()])
    assert not overlapping([parameter.grad for parameter in model.parameters()])
