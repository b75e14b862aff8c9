"""The arithmetic. `reference` is the specification, in plain torch operators, and runs on every device.

What is here works in memory of the caller's, so that a gradient is read and written where autograd left it and a
message is built where it is sent from. `values` is a sequence of contiguous float32 tensors of any shape that stands
for the concatenation of their elements, followed by zeros without end: the parameters of a bucket.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hvd_dyncomp.kernels import reference
from hvd_dyncomp.kernels.reference import Noise, block_bytes

__all__ = ["Noise", "block_bytes", "decode_into", "encode_into", "reduce_into"]


def encode_into(
    out: torch.Tensor,
    values: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    *,
    bits: int,
    block_size: int,
    first: int = 0,
    noise: Noise | None = None,
) -> None:
    """Quantizes n values + residual into `out`; what is lost becomes the new residual (equation 1).

    Args:
        out: (n / block_size * block_bytes(bits, block_size),) uint8, overwritten.
        values: see the module.
        residual: (n,) float32, updated in place; None for no error feedback.
        bits: a level below 32.
        block_size: values per block, a power of two from 64 to 65536.
        first: index of the first of the n values.
        noise: stochastic rounding with this randomness; None rounds to nearest.
    """
    count = out.numel() // block_bytes(bits, block_size) * block_size
    gradient = torch.zeros(count, dtype=torch.float32, device=out.device)
    for start, piece in _pieces(values, first, count):
        gradient[start : start + piece.numel()] = piece
    payload = reference.encode(gradient, residual, bits=bits, block_size=block_size, noise=noise)
    out.copy_(payload.view(-1))


def decode_into(
    values: Sequence[torch.Tensor],
    versions: Sequence[torch.Tensor],
    *,
    bits: int,
    block_size: int,
    first: int = 0,
    factor: float = 1.0,
) -> None:
    """Writes the sum of what `versions` stand for, times `factor` (equations 4 and 5).

    Args:
        values: where to, see the module; what would fall behind the last of them is dropped.
        versions: one or more (n / block_size * block_bytes(bits, block_size),) uint8, added in this order.
        first: index of the first of the n values.
        factor: multiplied into the steps, in float32.
    """
    total = reference.decode_sum(_blocks(versions, bits, block_size), bits=bits, block_size=block_size, factor=factor)
    for start, piece in _pieces(values, first, total.numel()):
        piece.copy_(total[start : start + piece.numel()])


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
    total = reference.decode_sum(_blocks(versions, bits, block_size), bits=bits, block_size=block_size)
    encode_into(out, [total], residual, bits=bits, block_size=block_size, noise=noise)


def _blocks(versions: Sequence[torch.Tensor], bits: int, block_size: int) -> list[torch.Tensor]:
    return [version.view(-1, block_bytes(bits, block_size)) for version in versions]


def _pieces(values: Sequence[torch.Tensor], first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Flat views of the parts of `values` among elements `first` to `first + count`, and where each begins there."""
    start = -first
    for tensor in values:
        begin, end = max(0, -start), min(tensor.numel(), count - start)
        if begin < end:
            yield start + begin, tensor.view(-1)[begin:end]
        start += tensor.numel()
