"""The level of each block of a bucket, and the kernels for spans of blocks of any levels."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.streams import uploaded
from hvd_dyncomp.kernels import Noise, block_bytes, dither_from
from hvd_dyncomp.kernels.scales import scale_bytes


class Span(NamedTuple):
    """Consecutive blocks of a bucket: `blocks` of them, beginning with block `first`."""

    first: int
    blocks: int


class Run(NamedTuple):
    """Consecutive blocks at one level: `blocks` of them, beginning with block `first` of the bucket."""

    first: int
    blocks: int
    bits: float


class Coding:
    """The codes of a bucket's blocks on the wire.

    The payload of a span is that of its blocks, in order; the level of a block gives its length.

    Args:
        runs: all blocks of the bucket, in order; neighbours of one level are in one run.
        block_size: values per block.
    """

    def __init__(self, runs: Sequence[Run], block_size: int) -> None:
        self._runs, self._block_size = runs, block_size
        self._upper_halves: dict[Span, torch.Tensor] = {}

    def nbytes(self, span: Span) -> int:
        """Length of a span's payload, bytes."""
        return sum(run.blocks * block_bytes(run.bits, self._block_size) for run in self._within(span))

    def encode(
        self,
        payload: torch.Tensor,
        span: Span,
        values: list[torch.Tensor],
        residual: torch.Tensor | None,
        *,
        dither: int,
        origin: int = 0,
        noise: Noise | None = None,
    ) -> None:
        """Quantize (`kernels.encode_into`).

        Args:
            payload: (nbytes(span),) uint8, overwritten.
            values: contiguous float32 tensors with the bucket's values from number `origin` on.
            residual: (values of the span,) bfloat16, updated in place; None for no error feedback.
            dither: of the bucket's blocks, for the rounding of the new residual.
            noise: for stochastic rounding.
        """
        near = _Near(values)
        for run, own, [piece] in self._pieces(span, [payload], residual):
            first = run.first * self._block_size
            some, begin = near.within(first - origin, run.blocks * self._block_size)
            form = {**self._form(run), "noise": _from(noise, first), "dither": dither_from(dither, run.first)}
            kernels.encode_into(piece, some, own, first=begin, **form)

    def reduce(
        self,
        payload: torch.Tensor,
        span: Span,
        versions: list[torch.Tensor],
        residual: torch.Tensor | None,
        *,
        dither: int,
        values: int,
        noise: Noise | None = None,
    ) -> None:
        """Decode versions of the span, sum, quantize (`kernels.reduce_into`). `values`: of the bucket, unpadded."""
        for run, own, [piece, *pieces] in self._pieces(span, [payload, *versions], residual):
            first = run.first * self._block_size
            real = max(0, values - first)
            form = {**self._form(run), "noise": _from(noise, first), "dither": dither_from(dither, run.first)}
            kernels.reduce_into(piece, pieces, own, real=real, **form)

    def decode(
        self, values: list[torch.Tensor], span: Span, versions: list[torch.Tensor], factor: float
    ) -> torch.Tensor:
        """Write the sum of the versions of the span, times `factor`, into the bucket's values.

        Returns:
            The number of blocks that are not finite in at least one version: an int64 on the device.
        """
        near = _Near(values)
        for run, _, pieces in self._pieces(span, versions):
            some, begin = near.within(run.first * self._block_size, run.blocks * self._block_size)
            kernels.decode_into(some, pieces, first=begin, factor=factor, **self._form(run))
        where = self._scales(span, versions[0].device)
        return count_nonfinite([version[where] for version in versions])

    def _scales(self, span: Span, device: torch.device) -> torch.Tensor:
        """Where the upper halves of the blocks' scales are in a span's payload: (2 * blocks,) int64."""
        if span not in self._upper_halves:
            found, start = [], 0
            for run in self._within(span):
                length = block_bytes(run.bits, self._block_size)
                found.append(start + scale_bytes(run.bits) - 2 + length * torch.arange(run.blocks, device="cpu"))
                start += length * run.blocks
            upper = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device="cpu")
            self._upper_halves[span] = uploaded(torch.stack([upper, upper + 1], dim=1).flatten(), device)
        return self._upper_halves[span]

    def _form(self, run: Run) -> dict:
        return {"bits": run.bits, "block_size": self._block_size}

    def _within(self, span: Span) -> Iterator[Run]:
        last = span.first + span.blocks
        for run in self._runs:
            first, end = max(run.first, span.first), min(run.first + run.blocks, last)
            if first < end:
                yield Run(first, end - first, run.bits)

    def _pieces(
        self, span: Span, payloads: list[torch.Tensor], residual: torch.Tensor | None = None
    ) -> Iterator[tuple[Run, torch.Tensor | None, list[torch.Tensor]]]:
        """For each run in the span: the run, its part of the residual and its part of each payload."""
        start = 0
        for run in self._within(span):
            end = start + run.blocks * block_bytes(run.bits, self._block_size)
            own = None
            if residual is not None:
                begin = (run.first - span.first) * self._block_size
                own = residual[begin : begin + run.blocks * self._block_size]
            yield run, own, [payload[start:end] for payload in payloads]
            start = end


class _Near:
    """Finds those of a bucket's tensors that a kernel needs.

    A bucket may have a thousand tensors and as many shards, and a kernel looks at each tensor that it gets.
    """

    def __init__(self, values: list[torch.Tensor]) -> None:
        self._values = values
        self._ends = list(itertools.accumulate(value.numel() for value in values))

    def within(self, first: int, count: int) -> tuple[list[torch.Tensor], int]:
        """The tensors with any of `count` values from number `first` on, and the place of that value in them."""
        begin = bisect.bisect_right(self._ends, first)
        end = bisect.bisect_left(self._ends, first + count) + 1
        return self._values[begin:end], first - (self._ends[begin - 1] if begin else 0)


def _from(noise: Noise | None, first: int) -> Noise | None:
    """The randomness for the bucket's values from number `first` on."""
    return noise and noise._replace(first=first)


def count_nonfinite(upper_halves: list[torch.Tensor]) -> torch.Tensor:
    """Count the blocks that are not finite in at least one version: an int64 on the versions' device.

    Args:
        upper_halves: of the scales in each version, (2 * blocks,) uint8: one bfloat16 each at every level.
    """
    # The scale of a block is NaN if a value is NaN or infinite.
    return torch.stack([half.view(torch.bfloat16) for half in upper_halves]).isnan().any(dim=0).sum()
