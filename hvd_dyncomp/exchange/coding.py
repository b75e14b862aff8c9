"""The level of each block of a bucket, and the kernels for spans of blocks."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import block_bytes, dither_from
from hvd_dyncomp.kernels.scales import values_per_scale

# Level of the blocks of small tensors (biases, norms), in a step at fewer bits. They cost next to nothing; as float32
# they would cost more than the rest.
SMALL_BITS = 8


class Span(NamedTuple):
    """Consecutive blocks of a bucket: `blocks` of them, beginning with block `first`."""

    first: int
    blocks: int


class Run(NamedTuple):
    """Consecutive tensors of a bucket without padding between them, which one call of a kernel may take.

    A call ends where values end: what it takes for padding has no residual, and counts in no scale.

    Attributes:
        first: its first block, with which its first tensor begins.
        end: the place in the bucket of the value behind its last one; the rest of that block is padding.
        small: whether the tensors have fewer than `min_numel` values, and so at least `SMALL_BITS`.
    """

    first: int
    end: int
    small: bool


class Values(NamedTuple):
    """Values of a bucket, in the tensors that have them; as one vector they are never made.

    Attributes:
        starts: the place in the bucket of each tensor's first value, ascending.
        tensors: contiguous, float32.
    """

    starts: list[int]
    tensors: list[torch.Tensor]

    def part(self, first: int, end: int) -> tuple[list[torch.Tensor], int]:
        """The tensors with values in places from `first` to `end`, and where the first of these is in them.

        A bucket may have a thousand tensors and as many shards, and a kernel looks at each tensor that it gets.
        """
        begin = bisect.bisect_right(self.starts, first) - 1
        return self.tensors[begin : bisect.bisect_left(self.starts, end)], first - self.starts[begin]


class Coding:
    """The codes of a bucket's blocks on the wire, in a step at one level.

    The payload of a span is that of its blocks, in order; the level of a block gives its length. To the kernels a block
    is what shares a scale: from one bit on a part of a bucket's block (`values_per_scale`).

    Args:
        bits: level of the step, below 32.
        runs: of the bucket, in order.
        block_size: values per block of the bucket.
    """

    def __init__(self, bits: float, runs: Sequence[Run], block_size: int) -> None:
        self._bits, self._runs, self._block_size = bits, runs, block_size
        self._firsts = [run.first for run in runs]

    def nbytes(self, span: Span) -> int:
        """Length of a span's payload, bytes."""
        return sum(part.blocks * self._block_bytes(self._level(run)) for part, run in self._parts(span))

    def encode(
        self,
        payload: torch.Tensor,
        span: Span,
        values: Values,
        residual: torch.Tensor | None,
        *,
        dither: int,
    ) -> None:
        """Quantize (`kernels.encode_into`).

        Args:
            payload: (nbytes(span),) uint8, overwritten.
            values: those of the span, at least.
            residual: (values of the span,) bfloat16, updated in place; None for no error feedback.
            dither: of the bucket's blocks, for the rounding of the new residual.
        """
        for part, end, form, own, [piece] in self._pieces(span, [payload], residual):
            some, begin = values.part(part.first * self._block_size, end)
            kernels.encode_into(piece, some, own, first=begin, dither=self._dither(part, form, dither), **form)

    def reduce(
        self,
        payload: torch.Tensor,
        span: Span,
        versions: list[torch.Tensor],
        residual: torch.Tensor | None,
        *,
        dither: int,
    ) -> None:
        """Decode versions of the span, sum, quantize (`kernels.reduce_into`)."""
        for part, end, form, own, [piece, *pieces] in self._pieces(span, [payload, *versions], residual):
            real = end - part.first * self._block_size
            kernels.reduce_into(piece, pieces, own, real=real, dither=self._dither(part, form, dither), **form)

    def decode(self, values: Values, span: Span, versions: list[torch.Tensor], factor: float) -> None:
        """Write the sum of the versions of the span, times `factor`, into the bucket's values."""
        for part, end, form, _, pieces in self._pieces(span, versions):
            some, begin = values.part(part.first * self._block_size, end)
            kernels.decode_into(some, pieces, first=begin, factor=factor, **form)

    def _dither(self, part: Span, form: dict, dither: int) -> int:
        """What rounds a part's residuals, from what rounds the bucket's."""
        return dither_from(dither, part.first * self._block_size // form["block_size"])

    def _block_bytes(self, bits: float) -> int:
        size = values_per_scale(bits, self._block_size)
        return self._block_size // size * block_bytes(bits, size)

    def _level(self, run: Run) -> float:
        return max(self._bits, SMALL_BITS) if run.small else self._bits

    def _parts(self, span: Span) -> Iterator[tuple[Span, Run]]:
        """The span's blocks in each run that has any."""
        last = span.first + span.blocks
        at = max(bisect.bisect_right(self._firsts, span.first) - 1, 0)
        for run in itertools.islice(self._runs, at, None):
            begin, end = max(span.first, run.first), min(last, -(-run.end // self._block_size))
            if begin >= last:
                return
            if begin < end:
                yield Span(begin, end - begin), run

    def _pieces(
        self, span: Span, payloads: list[torch.Tensor], residual: torch.Tensor | None = None
    ) -> Iterator[tuple[Span, int, dict, torch.Tensor | None, list[torch.Tensor]]]:
        """For each run in the span: its blocks, its end, their form, their part of the residual and of each payload."""
        start = 0
        for part, run in self._parts(span):
            bits = self._level(run)
            end = start + part.blocks * self._block_bytes(bits)
            begin = (part.first - span.first) * self._block_size
            own = None if residual is None else residual[begin : begin + part.blocks * self._block_size]
            form = {"bits": bits, "block_size": values_per_scale(bits, self._block_size)}
            yield part, run.end, form, own, [payload[start:end] for payload in payloads]
            start = end
