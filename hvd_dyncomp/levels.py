"""The bit-widths ("levels") that exist. Everything else in the package asks here."""

from numbers import Integral

from hvd_dyncomp.checks import shown

#: Bits per gradient value, ascending. 32 means uncompressed: Horovod's own allreduce.
LEVELS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)

UNCOMPRESSED = 32


def check_level(name: str, value: object) -> int:
    """Returns `value` if it is a level.

    Raises:
        ValueError: it is not; the message names the argument `name` and the value.
    """
    # bool is an int in Python, and True == 1 would pass for one bit.
    if isinstance(value, bool) or not isinstance(value, Integral) or value not in LEVELS:
        raise ValueError(f"{name} must be one of the levels {LEVELS} (bits per value), got {shown(value)}")
    return int(value)
