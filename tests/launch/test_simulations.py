"""What docs/design.md says about residuals when workers come and go."""

import pytest

from studies import simulate_resize


@pytest.mark.parametrize("bits", [1, 4])
def test_rescaling_residuals_loses_least(bits: int) -> None:
    errors = {rule: simulate_resize.error(rule, bits, steps=5, blocks=12, seed=3) for rule in simulate_resize.RULES}
    assert errors["rescale"] < errors["rescale own"] < min(errors["drop"], errors["keep"]), errors
