"""The level of each block of a bucket, and the kernels for spans of blocks of both levels."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import block_bytes, dither_from
from hvd_dyncomp.kernels.scales import values_per_scale

# Level of a bucket's tail: the blocks with values of small tensors (biases, norms), in a step at fewer bits. They cost
# next to nothing; as float32 they would cost more than the rest.
SMALL_BITS = 8


class Span(NamedTuple):
    """Consecutive blocks of a bucket: `blocks` of them, beginning with block `first`."""

    first: int
    blocks: int


class Coding:
    """The codes of a bucket's blocks on the wire, in a step at one level.

    The payload of a span is that of its blocks, in order; the level of a block gives its length. To the kernels a block
    is what shares a scale: from one bit on a part of a bucket's block (`values_per_scale`).

    Args:
        bits: level of the blocks before the tail.
        tail: first block of the tail, whose level is `SMALL_BITS`.
        block_size: values per block of the bucket.
    """

    def __init__(self, bits: float, tail: int, block_size: int) -> None:
        self._bits, self._tail, self._block_size = bits, tail, block_size

    def nbytes(self, span: Span) -> int:
        """Length of a span's payload, bytes."""
        return sum(part.blocks * self._block_bytes(bits) for part, bits in self._levels(span))

    def encode(
        self,
        payload: torch.Tensor,
        span: Span,
        values: list[torch.Tensor],
        residual: torch.Tensor | None,
        *,
        dither: int,
        first_value: int = 0,
    ) -> None:
        """Quantize (`kernels.encode_into`).

        Args:
            payload: (nbytes(span),) uint8, overwritten.
            values: contiguous float32 tensors with the bucket's values from number `first_value` on.
            residual: (values of the span,) bfloat16, updated in place; None for no error feedback.
            dither: of the bucket's blocks, for the rounding of the new residual.
        """
        whole = _Concatenation(values)
        for part, form, own, [piece] in self._pieces(span, [payload], residual):
            some, begin = whole.part(part.first * self._block_size - first_value, part.blocks * self._block_size)
            kernels.encode_into(piece, some, own, first=begin, dither=self._dither(part, form, dither), **form)

    def reduce(
        self,
        payload: torch.Tensor,
        span: Span,
        versions: list[torch.Tensor],
        residual: torch.Tensor | None,
        *,
        dither: int,
        values: int,
    ) -> None:
        """Decode versions of the span, sum, quantize (`kernels.reduce_into`). `values`: of the bucket, unpadded."""
        for part, form, own, [piece, *pieces] in self._pieces(span, [payload, *versions], residual):
            real = max(0, values - part.first * self._block_size)
            kernels.reduce_into(piece, pieces, own, real=real, dither=self._dither(part, form, dither), **form)

    def decode(self, values: list[torch.Tensor], span: Span, versions: list[torch.Tensor], factor: float) -> None:
        """Write the sum of the versions of the span, times `factor`, into the bucket's values."""
        whole = _Concatenation(values)
        for part, form, _, pieces in self._pieces(span, versions):
            some, begin = whole.part(part.first * self._block_size, part.blocks * self._block_size)
            kernels.decode_into(some, pieces, first=begin, factor=factor, **form)

    def _dither(self, part: Span, form: dict, dither: int) -> int:
        """What rounds a part's residuals, from what rounds the bucket's."""
        return dither_from(dither, part.first * self._block_size // form["block_size"])

    def _block_bytes(self, bits: float) -> int:
        size = values_per_scale(bits, self._block_size)
        return self._block_size // size * block_bytes(bits, size)

    def _levels(self, span: Span) -> list[tuple[Span, float]]:
        """The span's blocks before the tail and those in it, with their levels; neither is empty."""
        before = min(max(self._tail - span.first, 0), span.blocks)
        both = (Span(span.first, before), self._bits), (Span(span.first + before, span.blocks - before), SMALL_BITS)
        return [(part, bits) for part, bits in both if part.blocks]

    def _pieces(
        self, span: Span, payloads: list[torch.Tensor], residual: torch.Tensor | None = None
    ) -> Iterator[tuple[Span, dict, torch.Tensor | None, list[torch.Tensor]]]:
        """For each level in the span: its blocks, their form, their part of the residual and of each payload."""
        start = 0
        for part, bits in self._levels(span):
            end = start + part.blocks * self._block_bytes(bits)
            begin = (part.first - span.first) * self._block_size
            own = None if residual is None else residual[begin : begin + part.blocks * self._block_size]
            form = {"bits": bits, "block_size": values_per_scale(bits, self._block_size)}
            yield part, form, own, [payload[start:end] for payload in payloads]
            start = end


class _Concatenation:
    """A bucket's tensors as one vector, which is never made.

    A bucket may have a thousand tensors and as many shards, and a kernel looks at each tensor that it gets.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self._tensors = tensors
        self._ends = list(itertools.accumulate(map(torch.Tensor.numel, tensors)))

    def part(self, first: int, count: int) -> tuple[list[torch.Tensor], int]:
        """The tensors with any of `count` values from number `first` on, and the place of that value in them."""
        begin = bisect.bisect_right(self._ends, first)
        end = bisect.bisect_left(self._ends, first + count) + 1
        return self._tensors[begin:end], first - (self._ends[begin - 1] if begin else 0)
