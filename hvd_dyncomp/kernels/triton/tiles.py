"""The kernels: one program per tile of blocks. `operations` launches them.

Every program reads the values and residuals that it needs before it writes, and no other program touches its blocks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_dyncomp.kernels.triton.blocks import in_groups, quantize, quantize_groups
from hvd_dyncomp.kernels.triton.exact import bound, magnitude_bits, rounded_by, widened
from hvd_dyncomp.kernels.triton.memory import read, write
from hvd_dyncomp.kernels.triton.payload import decode_sum, write_bytes, write_packed, write_scale

# The compiler must not specialize on addresses, or on numbers that differ from call to call: a kernel is compiled once
# per level and kind of call.
ENCODE_VARIES = ["out", "table", "entries", "first", "residual", "dither", "real", "blocks"]
DECODE_VARIES = ["table", "entries", "first", "versions", "blocks", "factor"]


@triton.jit
def _own(table, entries, first, place, at, size, count, FROM_VERSIONS: tl.constexpr, FORM: tl.constexpr):
    """The tile's values in the order `at`, 0 where there is none: decoded versions, or read from tensors."""
    row = tl.arange(0, FORM.rows)[:, None]
    if FROM_VERSIONS:
        x = decode_sum(table, entries, place * FORM.bytes, 1.0, at, count, FORM)
    else:
        x = read(table, entries, first + place * FORM.size, row * FORM.size + at, size)
    return tl.where(row * FORM.size + at < size, x, 0.0)


@triton.jit
def _carried(residual, at, size, FORM: tl.constexpr):
    in_tile = tl.arange(0, FORM.rows)[:, None] * FORM.size + at
    return widened(tl.load(residual + in_tile, mask=in_tile < size, other=0))


@triton.jit
def _dithers(dither, place, at, FORM: tl.constexpr):
    """The dithers that round residuals number `at` of each block: int32 of 16 bits."""
    block = place.to(tl.uint32) + tl.arange(0, FORM.rows)[:, None].to(tl.uint32)
    index = block * FORM.dithers + (at & (FORM.dithers - 1)).to(tl.uint32)
    return ((index * FORM.dither_step + dither.to(tl.uint32, bitcast=True)) >> 16).to(tl.int32)


@triton.jit(do_not_specialize=ENCODE_VARIES, do_not_specialize_on_alignment=ENCODE_VARIES)
def encode(
    out,
    table,
    entries,
    first,
    residual,
    dither,
    real,
    blocks,
    FORM: tl.constexpr,
    FROM_VERSIONS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Quantize blocks of values + residual (equations 1, 1a and 1b).

    Args:
        out: payload, uint8.
        table: int64, addresses: of `entries` versions, or of as many tensors of values, see `memory`.
        first: index of the first value.
        residual: bfloat16, as int16; unused without RESIDUAL.
        dither: int32 taken as uint32.
        real: number of values that are not padding.
        FROM_VERSIONS: the values are sums of versions.
    """
    place = tl.program_id(0).to(tl.int64) * FORM.rows  # of the tile's first block
    count = tl.minimum(blocks - place, FORM.rows).to(tl.int32)
    size = tl.minimum(tl.maximum(real - place * FORM.size, 0), count * FORM.size).to(tl.int32)  # what is not padding
    row = tl.arange(0, FORM.rows)[:, None]
    at = tl.arange(0, FORM.size)[None, :]
    residual += place * FORM.size
    with_zeros = row < 0
    if RESIDUAL:
        carried = _carried(residual, at, size, FORM)
        x = _own(table, entries, first, place, at, size, count, FROM_VERSIONS, FORM)
        share, waits = bound(x, carried, FORM.bound, FORM.rows, FORM.halvings)
    if FORM.bits < 1:  # the same once more, from the caches, in another order
        at = in_groups(FORM)
        if RESIDUAL:
            carried = _carried(residual, at, size, FORM)
        x = _own(table, entries, first, place, at, size, count, FROM_VERSIONS, FORM)
    elif not RESIDUAL:
        x = _own(table, entries, first, place, at, size, count, FROM_VERSIONS, FORM)
    if FORM.outer:
        least = tl.min(tl.where(row * FORM.size + at < size, magnitude_bits(x), 1), axis=1)
        with_zeros = tl.reshape(least, (FORM.rows, 1)) == 0
    if RESIDUAL:
        x = tl.where(waits, 0.0, x + carried * share)

    reals = tl.minimum(tl.maximum(size - row * FORM.size, 0), FORM.size)
    payload = out + place * FORM.bytes
    if FORM.bits < 1:
        scale, codes, values = quantize_groups(x, reals, FORM)
        write_bytes(payload, codes, count, FORM)
    else:
        scale, codes, values = quantize(x, reals, with_zeros, FORM)
        write_packed(payload, codes, count, FORM)
    write_scale(payload, scale, count, FORM)
    if RESIDUAL:
        in_tile = row * FORM.size + at
        # One after the other: for a tile-sized "and" of both, the compiler chose a layout in which each lane has a row.
        # The old residual is read again, because it would need as many registers as x.
        carried = _carried(residual, at, size, FORM)
        lost = tl.where((scale == scale) & (waits == 0), x - values, carried)
        # The old residual is bfloat16: no dither changes it.
        kept = rounded_by(tl.where(in_tile < size, lost, 0.0), _dithers(dither, place, at, FORM), FORM.largest_residual)
        tl.store(residual + in_tile, kept, mask=in_tile < count * FORM.size)


@triton.jit(do_not_specialize=DECODE_VARIES, do_not_specialize_on_alignment=DECODE_VARIES)
def decode(table, entries, first, versions, blocks, factor, FORM: tl.constexpr):
    """Write the sum of versions, times `factor` (equations 4 and 5).

    Args:
        table: int64, of `entries` tensors, see `memory`; behind it, the addresses of `versions` versions.
        first: index of the first value.
    """
    place = tl.program_id(0).to(tl.int64) * FORM.rows
    count = tl.minimum(blocks - place, FORM.rows).to(tl.int32)
    at = tl.arange(0, FORM.size)[None, :]
    x = decode_sum(table + 2 * entries + 1, versions, place * FORM.bytes, factor, at, count, FORM)
    in_tile = tl.arange(0, FORM.rows)[:, None] * FORM.size + at
    write(table, entries, first + place * FORM.size, in_tile, count * FORM.size, x)
