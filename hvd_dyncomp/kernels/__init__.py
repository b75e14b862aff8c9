"""The arithmetic. `reference` is the specification, in plain torch operators, and runs on every device.

What is here writes into memory of the caller's, so that a gradient is read where autograd left it and a message is
built where it is sent from.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hvd_dyncomp.kernels import reference
from hvd_dyncomp.kernels.reference import Noise, block_bytes

__all__ = ["Noise", "block_bytes", "decode_into", "encode_into", "reduce_into"]


def encode_into(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    bits: int,
    block_size: int,
    noise: Noise | None = None,
) -> None:
    """Quantizes gradient + residual into `out`; what is lost becomes the new residual (equation 1).

    Args:
        out: (n / block_size * block_bytes(bits, block_size),) uint8, overwritten.
        gradient: (n,) float32, n a multiple of `block_size`.
        residual: (n,) float32, updated in place; None for no error feedback.
        bits: a level below 32.
        block_size: values per block, a power of two from 64 to 65536.
        noise: stochastic rounding with this randomness; None rounds to nearest.
    """
    payload = reference.encode(gradient, residual, bits=bits, block_size=block_size, noise=noise)
    out.copy_(payload.view(-1))


def decode_into(
    out: torch.Tensor, versions: Sequence[torch.Tensor], *, bits: int, block_size: int, factor: float = 1.0
) -> None:
    """The sum over `versions` of the values they stand for, times `factor` (equations 4 and 5).

    Args:
        out: (n,) float32, n a multiple of `block_size`, overwritten.
        versions: one or more (n / block_size * block_bytes(bits, block_size),) uint8, added in this order.
        factor: multiplied into the steps, in float32.
    """
    shape = (-1, block_bytes(bits, block_size))
    payloads = [version.view(shape) for version in versions]
    out.copy_(reference.decode_sum(payloads, bits=bits, block_size=block_size, factor=factor))


def reduce_into(
    out: torch.Tensor,
    versions: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    *,
    bits: int,
    block_size: int,
    noise: Noise | None = None,
) -> None:
    """Decodes and sums `versions`, and quantizes the sum + residual into `out` (equations 5 and 1).

    Args:
        out, residual, noise: as in `encode_into`.
        versions: as in `decode_into`; `out` may not overlap them.
    """
    shape = (-1, block_bytes(bits, block_size))
    payloads = [version.view(shape) for version in versions]
    total = reference.decode_sum(payloads, bits=bits, block_size=block_size)
    encode_into(out, total, residual, bits=bits, block_size=block_size, noise=noise)
