"""The scale of a block: its limits, its form on the wire, and the sums it is made of. Part of the reference."""

from __future__ import annotations

import torch

# Below this scale a block counts as zero: that keeps 1 / scale and every product finite. The residual keeps the values.
SMALLEST_SCALE = 2.0**-100
# A block whose outermost code stands for more counts as infinite. It is half of what float32 can hold, so that no code
# overflows, whatever the rounding of its scale, and no residual becomes infinite.
LARGEST_VALUE = 2.0**127


def scale_bytes(bits: float) -> int:
    """Bytes of a block's scale on the wire: a float32; below one bit, a bfloat16."""
    return 4 if bits >= 1 else 2


def block_bytes(bits: float, block_size: int) -> int:
    """Bytes of one block on the wire."""
    return scale_bytes(bits) + int(block_size * bits) // 8


def to_bytes(scale: torch.Tensor, bits: float) -> torch.Tensor:
    """(blocks, 1) float32, below one bit already rounded to bfloat16, as (blocks, scale_bytes(bits)) uint8."""
    # The upper half of a float32 is the bfloat16. Torch's conversion makes other bits of a NaN.
    return scale.contiguous().view(torch.uint8)[:, 4 - scale_bytes(bits) :]


def scales(payload: torch.Tensor, bits: float, block_size: int) -> torch.Tensor:
    """The scales of the blocks in `payload`: NaN for blocks that are not finite.

    Args:
        payload: (blocks * block_bytes(bits, block_size)) uint8 of any shape, at any address.
        bits: a level below 32.

    Returns:
        (blocks,) float32.
    """
    own = payload.reshape(-1, block_bytes(bits, block_size))[:, : scale_bytes(bits)]
    # A copy, not `contiguous()`, which keeps a single block at its address: a float may not be aligned there.
    own = own.clone(memory_format=torch.contiguous_format)
    return own.view(torch.float32 if bits >= 1 else torch.bfloat16).to(torch.float32).view(-1)


def tree_sum(x: torch.Tensor) -> torch.Tensor:
    """Sum each row of a power-of-two length by adding its halves until one value is left: (rows, 1)."""
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x
