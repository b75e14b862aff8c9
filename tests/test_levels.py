"""What is a level, and what stands for it where only whole numbers go."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from hvd_dyncomp import LEVELS
from hvd_dyncomp.levels import check_level, level_code, level_from_code


@pytest.mark.parametrize("bits", LEVELS)
def test_a_level_is_an_int_from_one_bit_on_and_a_float_below(bits):
    assert check_level("bits", bits) == bits and type(check_level("bits", bits)) is (int if bits >= 1 else float)


@pytest.mark.parametrize("value", [np.int64(4), np.uint8(1), np.float64(0.5), np.float32(0.125), Fraction(1, 4)])
def test_numbers_of_other_types_pass_for_the_levels_that_they_equal(value):
    got = check_level("bits", value)
    assert got == value and type(got) is (int if value >= 1 else float)


@pytest.mark.parametrize(
    "value",
    [
        True,
        False,
        4.0,
        1.0,
        np.float64(8),
        0.3,
        0.75,
        0.0625,
        0.0,
        -0.5,
        0,
        9,
        -4,
        math.nan,
        math.inf,
        0.5j,
        "0.5",
        None,
    ]
    + [[0.5], (4,), np.array(0.5), np.array([4]), torch.tensor(0.5), Decimal("0.5"), 10**400],
)
def test_nothing_else_does(value):
    with pytest.raises(ValueError, match=r"^floor must be one of the levels \(0\.125, 0\.25, 0\.5, 1, 2, .*, got "):
        check_level("floor", value)


def test_codes_of_levels():
    codes = [level_code(bits) for bits in LEVELS]
    assert codes == [-8, -4, -2, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32]
    for code, bits in zip(codes, LEVELS, strict=True):
        assert level_from_code(code) == bits and type(level_from_code(code)) is type(bits)


@pytest.mark.parametrize("code", range(-128, 128))
def test_the_code_of_no_level_becomes_no_level(code):
    """Every signed byte: it may come from another machine."""
    known = {level_code(bits) for bits in LEVELS}
    assert (level_from_code(code) in LEVELS) == (code in known)
