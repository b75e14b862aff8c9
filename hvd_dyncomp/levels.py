"""The bit-widths ("levels") that exist. The rest of the package asks here."""

from argparse import ArgumentTypeError
from numbers import Real

from hvd_dyncomp.checks import shown

LEVELS: tuple[float, ...] = (0.125, 0.25, 0.5, 1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
"""Bits per gradient value, ascending: floats below one bit, integers from one bit on. 32 means uncompressed."""

UNCOMPRESSED = 32


def check_level(name: str, value: object) -> float:
    """Return `value` as it is in `LEVELS`.

    Args:
        name: of the argument, for the error message.
        value: bits per value.

    Raises:
        ValueError: `value` is not a level; the message names the argument and the value.
    """
    # bool is an int in Python: True == 1 would pass for one bit.
    if isinstance(value, bool) or not isinstance(value, Real) or value not in LEVELS:
        raise ValueError(f"{name} must be one of the levels {LEVELS} (bits per value), got {shown(value)}")
    return LEVELS[LEVELS.index(value)]


def level_argument(text: str) -> float:
    """A level on a command line: a `type` for `argparse`."""
    try:
        return LEVELS[LEVELS.index(float(text))]
    except ValueError:
        raise ArgumentTypeError(f"{text!r} is not one of the levels {', '.join(map(str, LEVELS))}") from None


def levels_argument(text: str) -> list[float]:
    """Levels separated by commas, each once, likewise."""
    return list(dict.fromkeys(map(level_argument, text.split(","))))


def level_code(bits: float) -> int:
    """A level, or 0, as an integer that fits a signed byte: n for n bits, -n for 1/n bit."""
    return -round(1 / bits) if 0 < bits < 1 else int(bits)


def level_of(code: int) -> float:
    """The inverse of `level_code`, for any integer."""
    return code if code >= -1 else -1 / code
