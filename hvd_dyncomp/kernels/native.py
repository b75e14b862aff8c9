"""The C++ kernels in csrc/, for tensors on the CPU: the operations of `hvd_dyncomp.kernels`, on checked arguments.

The extension takes addresses and sizes. It does not depend on torch, and so works with every version of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

import hvd_dyncomp.kernels._native as _native  # type: ignore[import-not-found]  # if it is missing, the error says so
from hvd_dyncomp.levels import level_code


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
    address = 0 if residual is None else residual.data_ptr()
    shape = (blocks, block_size, level_code(bits))
    _native.encode(out.data_ptr(), _pieces(values), first, address, dither, *shape)


def decode_into(
    values: Sequence[torch.Tensor],
    first: int,
    versions: Sequence[torch.Tensor],
    blocks: int,
    block_size: int,
    bits: float,
    factor: float,
) -> None:
    _native.decode(_pieces(values), first, _addresses(versions), blocks, block_size, level_code(bits), factor)


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
    address = 0 if residual is None else residual.data_ptr()
    shape = (blocks, block_size, level_code(bits))
    _native.reduce(out.data_ptr(), _addresses(versions), address, dither, real, *shape)


def variants() -> list[str]:
    """The instruction sets of this processor that the kernels have; the fastest, which is in use, first."""
    return _native.variants()


@contextmanager
def using(variant: str) -> Iterator[None]:
    """Run the kernels with another instruction set, in all threads: for tests and benchmarks.

    Raises:
        ValueError: this processor does not have it.
    """
    before = _native.use(variant)
    try:
        yield
    finally:
        _native.use(before)


def _addresses(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([tensor.data_ptr() for tensor in tensors])


def _pieces(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    pairs: list[int] = []
    for tensor in tensors:
        pairs += (tensor.data_ptr(), tensor.numel())
    return tuple(pairs)
