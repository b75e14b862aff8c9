"""The scale of a block: its limits, its form on the wire, and the sums it is made of. Part of the reference."""

from __future__ import annotations

import torch

# Below this scale a block counts as zero: that keeps 1 / scale and every product finite. The values go to the residual,
# which the gradients bound (equation 1a), so gradients that stay so small never arrive.
SMALLEST_SCALE = 2.0**-100
# A block whose outermost code stands for more counts as infinite. It is half of what float32 can hold, so that no code
# overflows, whatever the rounding of its scale, and no residual becomes infinite.
LARGEST_VALUE = 2.0**127
# On the wire a scale is a little-endian bfloat16.
SCALE_BYTES = 2
# From one bit on no more values than these share a scale. docs/dev/experiments.md says why.
VALUES_PER_SCALE = 128


def values_per_scale(bits: float, block_size: int) -> int:
    """How many values of a bucket's block share a scale: what is a block to the kernels at this level."""
    return min(block_size, VALUES_PER_SCALE) if bits >= 1 else block_size


def block_bytes(bits: float, block_size: int) -> int:
    """Bytes of one block on the wire."""
    return SCALE_BYTES + int(block_size * bits) // 8


def rounded_up(scale: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 that is not smaller, as float32; `scale` is not negative. A NaN stays one."""
    bits = (scale.view(torch.int32).to(torch.int64) + 0xFFFF) & 0x7FFF0000
    return torch.where(scale.isnan(), scale, bits.to(torch.int32).view(torch.float32))


def to_bytes(scale: torch.Tensor) -> torch.Tensor:
    """(blocks, 1) float32, already rounded to bfloat16, as (blocks, SCALE_BYTES) uint8."""
    # The upper half of a float32 is the bfloat16. Torch's conversion makes other bits of a NaN.
    return scale.contiguous().view(torch.uint8)[:, 4 - SCALE_BYTES :]


def scales(payload: torch.Tensor, bits: float, block_size: int) -> torch.Tensor:
    """The scales of the blocks in `payload`: NaN for blocks that are not finite, negative for three codes of 2 bits.

    Args:
        payload: (blocks * block_bytes(bits, block_size)) uint8 of any shape, at any address.
        bits: a level below 32.

    Returns:
        (blocks,) float32.
    """
    own = payload.reshape(-1, block_bytes(bits, block_size))[:, :SCALE_BYTES]
    # A copy, not `contiguous()`, which keeps a single block at its address: a bfloat16 may not be aligned there.
    own = own.clone(memory_format=torch.contiguous_format)
    return own.view(torch.bfloat16).to(torch.float32).view(-1)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum each row of a power-of-two length by adding its halves until one value is left: (rows, 1)."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x
