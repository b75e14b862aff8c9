"""How many bytes a gradient is when it is sent."""

from __future__ import annotations

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels.scales import values_per_scale
from hvd_dyncomp.levels import LEVELS as ALL_LEVELS
from hvd_dyncomp.levels import UNCOMPRESSED, check_level

BLOCK_SIZE = 512

# A message's header: the number of a step.
HEADER_BYTES = 8

#: Bits a value that blocks may have, ascending.
LEVELS = tuple(bits for bits in ALL_LEVELS if bits != UNCOMPRESSED)


def block_bytes(bits: float) -> int:
    """Bytes of one block of 512 values with its scales."""
    size = values_per_scale(check_level("bits", bits), BLOCK_SIZE)
    return BLOCK_SIZE // size * kernels.block_bytes(bits, size)


def message_bytes(values: int, bits: float) -> int:
    """Bytes of so many values as one run of blocks, header included."""
    return HEADER_BYTES - (-values // BLOCK_SIZE) * block_bytes(bits)
