"""Which numbers are levels, and how a level travels in one byte."""

from argparse import ArgumentTypeError
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS
from hvd_dyncomp.levels import check_level, level_code, level_of, levels_argument


@pytest.mark.parametrize("bits", LEVELS)
def test_a_level_is_what_equals_one(bits):
    """Whatever it came as: JSON, numpy, a command line."""
    for number in (bits, float(bits), np.float32(bits), Fraction(bits)):
        found = check_level("bits", number)
        assert found == bits and type(found) is (int if bits >= 1 else float)
        assert str(found) == str(bits)


@given(st.floats() | st.fractions() | st.integers())
def test_no_other_number_is(number):
    if number not in LEVELS:
        with pytest.raises(ValueError, match="bits must be one of the levels .*, got "):
            check_level("bits", number)


@pytest.mark.parametrize(
    "value",
    [True, False, 0.5j, "0.5", None, [0.5], (4,), np.array(0.5), np.array([4]), torch.tensor(0.5), Decimal("0.5")],
)
def test_nothing_else_is(value):
    with pytest.raises(ValueError, match="bits must be one of the levels .*, got "):
        check_level("bits", value)


def test_every_level_has_a_byte_of_its_own():
    codes = {level_code(bits): bits for bits in (0, *LEVELS)}
    assert len(codes) == len(LEVELS) + 1 and all(-128 <= code < 128 for code in codes)
    for code in range(-128, 128):
        bits = level_of(code)
        assert bits == codes[code] if code in codes else bits not in LEVELS


def test_levels_of_a_command_line():
    assert levels_argument("4,0.25,4.0,32") == [4, 0.25, 32]
    for text, wrong in (("4,5.5", "5.5"), ("", ""), ("4;8", "4;8"), ("nan", "nan")):
        with pytest.raises(ArgumentTypeError, match=f"^'{wrong}' is not one of the levels 0.125, "):
            levels_argument(text)
