"""What docs/design.md says about residuals when workers come and go, and docs/math.md about their bound."""

import pytest
import simulate_bound
import simulate_resize


@pytest.mark.parametrize("bits", [1, 4])
def test_rescaling_residuals_loses_least(bits: int) -> None:
    errors = {rule: simulate_resize.error(rule, bits, steps=5, blocks=12, seed=3) for rule in simulate_resize.RULES}
    assert errors["rescale"] < errors["rescale own"] < min(errors["drop"], errors["keep"]), errors


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_bound_costs_nothing_where_nothing_is_wrong(bits: int) -> None:
    found = {rule: simulate_bound.Sums(rule, "slow", 3, bits, 20, 4096, 0).error for rule in ("unbounded", "norm to 6")}
    assert found["norm to 6"] <= 1.02 * found["unbounded"], found


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_bound_ends_a_disturbance(bits: int) -> None:
    first, *_, last = map(float, simulate_bound.recovery("norm to 6", 1, 2, bits, 4096, 0).split())
    assert first < 7 and last < 1.7 < 1000 < float(simulate_bound.recovery("unbounded", 1, 2, bits, 4096, 0).split()[0])
