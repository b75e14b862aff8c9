"""The operations of `hvd_dyncomp.kernels` by the reference, for tensors on any device, on checked arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hvd_dyncomp.kernels import reference
from hvd_dyncomp.kernels.scales import block_bytes


def encode_into(
    out: torch.Tensor,
    values: Sequence[torch.Tensor],
    first: int,
    residual: torch.Tensor | None,
    blocks: int,
    block_size: int,
    bits: float,
    dither: int,
) -> None:
    gradient = torch.zeros(blocks * block_size, dtype=torch.float32, device=out.device)
    real = 0
    for start, piece in _pieces(values, first, gradient.numel()):
        real = start + piece.numel()
        gradient[start:real] = piece
    _encode(out, gradient, residual, real, block_size, bits, dither)


def decode_into(
    values: Sequence[torch.Tensor],
    first: int,
    versions: Sequence[torch.Tensor],
    blocks: int,
    block_size: int,
    bits: float,
    factor: float,
) -> None:
    total = _decode_sum(versions, blocks, block_size, bits, factor)
    for start, piece in _pieces(values, first, total.numel()):
        piece.copy_(total[start : start + piece.numel()])


def reduce_into(
    out: torch.Tensor,
    versions: Sequence[torch.Tensor],
    residual: torch.Tensor | None,
    real: int,
    blocks: int,
    block_size: int,
    bits: float,
    dither: int,
) -> None:
    total = _decode_sum(versions, blocks, block_size, bits, 1.0)
    _encode(out, total, residual, real, block_size, bits, dither)


def _encode(
    out: torch.Tensor,
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    real: int,
    block_size: int,
    bits: float,
    dither: int,
) -> None:
    payload = reference.encode(gradient, residual, bits=bits, block_size=block_size, real=real, dither=dither)
    out.view(-1).copy_(payload.view(-1))


def _decode_sum(
    versions: Sequence[torch.Tensor], blocks: int, block_size: int, bits: float, factor: float
) -> torch.Tensor:
    rows = [version.view(blocks, block_bytes(bits, block_size)) for version in versions]
    return reference.decode_sum(rows, bits=bits, block_size=block_size, factor=factor)


def _pieces(values: Sequence[torch.Tensor], first: int, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Flat views of the parts of `values` within elements `first` to `first + count`, and each one's start there."""
    start = -first
    for tensor in values:
        begin, end = max(0, -start), min(tensor.numel(), count - start)
        if begin < end:
            yield start + begin, tensor.view(-1)[begin:end]
        start += tensor.numel()
