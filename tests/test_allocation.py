"""Levels of tensors within a budget: as good as the best there are, never over it, and the same everywhere."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS
from hvd_dyncomp.allocation import LEAST, LOST, allocate, error

SIZES = st.lists(st.integers(1, 10**6), min_size=1, max_size=12)
BUDGETS = st.floats(0.05, 9)


@st.composite
def tensors(draw):
    sizes = draw(SIZES)
    energies = draw(st.lists(st.floats(0, 1e30), min_size=len(sizes), max_size=len(sizes)))
    return sizes, energies


def spent(sizes, levels):
    return sum(size * bits for size, bits in zip(sizes, levels, strict=True)) / sum(sizes)


def test_the_levels_are_levels_and_more_bits_lose_less():
    assert set(LOST) <= set(LEVELS) and list(LOST) == sorted(LOST)
    assert list(LOST.values()) == sorted(LOST.values(), reverse=True)


@settings(deadline=None)
@given(tensors(), BUDGETS)
def test_the_budget_is_kept(tensors, budget):
    sizes, energies = tensors
    levels = allocate(sizes, energies, budget)
    assert len(levels) == len(sizes) and set(levels) <= set(LOST)
    assert spent(sizes, levels) <= max(budget, LEAST) * (1 + 1e-12)


@settings(deadline=None)
@given(tensors(), st.sampled_from([bits for bits in LOST if bits > LEAST]))
def test_no_worse_than_one_level_for_all_but_for_what_is_left_over(tensors, bits):
    """A step up that is too dear for what is left is not made: its worth is all that may be missing."""
    sizes, energies = tensors
    uniform = error(energies, [bits] * len(sizes))
    worth = max(energies) * (1 - LOST[8])
    assert error(energies, allocate(sizes, energies, bits)) <= uniform + worth * (1 + 1e-9)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(1e-6, 1e6), min_size=2, max_size=4), st.floats(0.2, 6))
def test_near_the_best_of_all_allocations(energies, budget):
    """Equal sizes, every combination tried: between the best within the budget and within it less one step."""
    sizes = [100] * len(energies)
    found = error(energies, allocate(sizes, energies, budget))
    rows = [row for row in itertools.product(LOST, repeat=len(sizes))]
    best = min(error(energies, row) for row in rows if spent(sizes, row) <= max(budget, LEAST))
    tighter = max(budget - 1 / len(sizes), LEAST)
    assert (
        best * (1 - 1e-9) <= found <= min(error(energies, row) for row in rows if spent(sizes, row) <= tighter) * 1.0001
    )


@settings(deadline=None)
@given(tensors(), BUDGETS)
def test_what_has_more_energy_a_value_has_no_lower_level(tensors, budget):
    """Among tensors of one size. (What a step up would gain must not be less than the least float.)"""
    energies = [energy if energy > 1e-300 else 0.0 for energy in tensors[1]]
    sizes = [1000] * len(energies)
    pairs = sorted(zip(energies, allocate(sizes, energies, budget), strict=True))
    assert [bits for _, bits in pairs] == sorted(bits for _, bits in pairs)


@settings(deadline=None)
@given(tensors(), BUDGETS, st.integers(-20, 20))
def test_the_unit_of_energy_does_not_matter(tensors, budget, exponent):
    """As a gradient scaler changes it: exactly, for powers of two."""
    sizes, energies = tensors
    energies = [energy if energy > 1e-6 else 0.0 for energy in energies]
    assert allocate(sizes, energies, budget) == allocate(sizes, [energy * 2.0**exponent for energy in energies], budget)


def test_energies_of_a_resnet():
    """Orders of magnitude between layers: half a bit, well spent, loses less than two bits for everyone."""
    sizes = [2304] * 7 + [9216] * 6 + [36864] * 6
    energies = [size * 4.0**-depth for depth, size in enumerate(sizes)]
    assert error(energies, allocate(sizes, energies, 0.5)) < error(energies, [2] * len(sizes))
    assert spent(sizes, allocate(sizes, energies, 0.5)) == pytest.approx(0.5, abs=0.02)


@settings(deadline=None)
@given(SIZES, BUDGETS)
def test_of_equal_energies_the_smaller_tensor_has_no_lower_level(sizes, budget):
    levels = allocate(sizes, [1.0] * len(sizes), budget)
    by_size = sorted(zip(sizes, levels, strict=True), key=lambda pair: (-pair[0], pair[1]))
    assert [bits for _, bits in by_size] == sorted(levels)


def test_what_is_too_dear_for_one_is_spent_on_others():
    assert allocate([1000, 10], [1e6, 1.0], 0.15) == (0.125, 2)
