"""What a block of a gradient becomes when it is sent: the kernels of the library, without a residual."""

from __future__ import annotations

import torch
from torch import Tensor

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.wire import HEADER_BYTES
from hvd_dyncomp.levels import LEVELS as ALL_LEVELS
from hvd_dyncomp.levels import UNCOMPRESSED, check_level

BLOCK_SIZE = 512

#: Bits a value that blocks may have, ascending.
LEVELS = tuple(bits for bits in ALL_LEVELS if bits != UNCOMPRESSED)


def block_bytes(bits: float) -> int:
    """Bytes of one block of 512 values with its scale."""
    return kernels.block_bytes(check_level("bits", bits), BLOCK_SIZE)


def message_bytes(values: int, bits: float) -> int:
    """Bytes of so many values as one run of blocks, header included."""
    return HEADER_BYTES - (-values // BLOCK_SIZE) * block_bytes(bits)


def decoded(values: Tensor, bits: float) -> Tensor:
    """What arrives of some values that are sent once, without a residual.

    Args:
        values: (n,) float32, contiguous; its last block may be a part of one.
        bits: one of `LEVELS`.

    Returns:
        (n,) float32.
    """
    level = check_level("bits", bits)
    message = torch.empty(-(-values.numel() // BLOCK_SIZE) * block_bytes(bits), dtype=torch.uint8)
    kernels.encode_into(message, [values], None, bits=level, block_size=BLOCK_SIZE)
    arrived = torch.empty_like(values)
    kernels.decode_into([arrived], [message], bits=level, block_size=BLOCK_SIZE)
    return arrived
