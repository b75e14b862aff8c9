"""What a block of a gradient becomes on its way, at every level: the library's own codes, and codes below one bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hvd_dyncomp import kernels

BLOCK_SIZE = 512
HEADER_BYTES = 16  # of a message, docs/wire_format.md

#: Bits a value, ascending.
LEVELS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 3, 4, 5, 6, 7, 8, 16)


@dataclass(frozen=True)
class Sparse:
    """Codes below one bit: of each group of values only the largest is sent, as one byte of position, sign and code.

    Attributes:
        codes: the largest code; the magnitude is a code times the block's scale.
        rms: the scale is rms * (root mean square of the groups' largest) + maximum * (the largest of all).
        maximum: see `rms`.
    """

    codes: int
    rms: float
    maximum: float


# A byte for 8 / bits values: 4, 5 or 6 bits of position, one of sign, the rest for the code.
SPARSE = {1 / 2: Sparse(7, 0.25, 0.0), 1 / 4: Sparse(3, 0.45, 0.05), 1 / 8: Sparse(1, 1.0, 0.05)}
SPARSE_SCALE_BYTES = 2


def block_bytes(bits: float) -> int:
    """Bytes of one block of 512 values with its scale."""
    if bits < 1:
        return SPARSE_SCALE_BYTES + int(BLOCK_SIZE * bits) // 8
    return kernels.block_bytes(int(bits), BLOCK_SIZE)


def decoded(values: Tensor, bits: float) -> Tensor:
    """What arrives of some values that are sent once, without a residual.

    Args:
        values: (n,) float32, contiguous; its last block may be a part of one.
        bits: one of `LEVELS`.

    Returns:
        (n,) float32.
    """
    if bits < 1:
        return _sparse(values, SPARSE[bits], groups=int(BLOCK_SIZE * bits) // 8)
    blocks = -(-values.numel() // BLOCK_SIZE)
    message = torch.empty(blocks * block_bytes(bits), dtype=torch.uint8)
    kernels.encode_into(message, [values], None, bits=int(bits), block_size=BLOCK_SIZE)
    arrived = torch.empty_like(values)
    kernels.decode_into([arrived], [message], bits=int(bits), block_size=BLOCK_SIZE)
    return arrived


def _sparse(values: Tensor, sparse: Sparse, groups: int) -> Tensor:
    """Value j of a block is in group j modulo `groups`."""
    blocks = -(-values.numel() // BLOCK_SIZE)
    padded = torch.zeros(blocks, BLOCK_SIZE // groups, groups)
    padded.view(-1)[: values.numel()] = values
    largest, position = padded.abs().max(dim=1, keepdim=True)
    scale = sparse.rms * largest.square().mean(2, keepdim=True).sqrt() + sparse.maximum * largest.amax(2, keepdim=True)
    scale = scale.bfloat16().float()
    code = torch.where(scale > 0, largest / scale, 0.0).round().clamp(0, sparse.codes)
    sent = (code * scale).copysign(padded.gather(1, position))
    return torch.zeros_like(padded).scatter_(1, position, sent).view(-1)[: values.numel()]
