"""The bit-widths ("levels") that exist. Everything else in the package asks here."""

from numbers import Integral, Real
from typing import Any

from hvd_dyncomp.checks import shown

#: Bits per gradient value, ascending: floats below 1, ints from 1 on. 32 means uncompressed: Horovod's own allreduce.
LEVELS = (0.125, 0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)

UNCOMPRESSED = 32


# Any: an int from 1 bit on, and a float below, which no type says.
def check_level(name: str, value: object) -> Any:
    """Returns `value` if it is a level: as a float below 1 bit, as an int from there on.

    Whole numbers of any type pass, and below one bit all that equals 1/2, 1/4 or 1/8.

    Raises:
        ValueError: it is not; the message names the argument `name` and the value.
    """
    # bool is an int in Python, and True == 1 would pass for one bit.
    if isinstance(value, Real) and not isinstance(value, bool) and value in LEVELS:
        if isinstance(value, Integral):
            return int(value)
        if value < 1:
            return float(value)
    raise ValueError(f"{name} must be one of the levels {LEVELS} (bits per value), got {shown(value)}")


def level_code(bits: float) -> int:
    """A level as a whole number of -8 to 32: itself, or below one bit -1 / bits."""
    return int(bits) if bits >= 1 else -round(1 / bits)


def level_from_code(code: int) -> float:
    """The inverse of `level_code`, of any whole number: what is no level's code becomes no level."""
    return code if code >= 0 else -1 / code
