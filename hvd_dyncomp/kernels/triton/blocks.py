"""From a tile of values to scales, codes, and the values of the codes (equations 2 and 3).

Tiles are (blocks, block size), `real` (blocks, 1) is the number of values per block that are not padding, and scales
are (blocks, 1): 0 where a block counts as zero, NaN where it is not finite.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_dyncomp.kernels.triton.exact import (
    evenly,
    floor,
    inverse,
    magnitude_bits,
    nearest,
    of_four,
    placed,
    squares,
    to_bfloat16,
    tree_sum,
    up_to_bfloat16,
    weighted,
)
from hvd_dyncomp.kernels.triton.payload import group_of


@triton.jit
def _maximum(x, FORM: tl.constexpr):
    """The largest magnitude of each block in float64, NaN if there is one."""
    bits = tl.reshape(tl.max(magnitude_bits(x), axis=1), (FORM.rows, 1))
    return bits.to(tl.float32, bitcast=True).to(tl.float64)


@triton.jit
def _on_the_wire(scale, live, finite):
    """The scale as sent. NaN makes the whole block NaN when it is decoded; the format fixes which NaN."""
    bits = tl.where(live, scale, 0.0).to(tl.int32, bitcast=True)
    return tl.where(finite, bits, 0x7FC00000).to(tl.float32, bitcast=True)


@triton.jit
def _few_reach(x, real, scale, FORM: tl.constexpr):
    """`reference._few_reach`: (blocks, 1)."""
    # By the signs of differences: for tiles of truth values the compiler chose a layout in which each lane has a row.
    below = (magnitude_bits(x) - (scale * 0.5).to(tl.int32, bitcast=True)) >> 31
    reaching = tl.reshape(tl.sum(below + 1, axis=1), (FORM.rows, 1))
    return reaching.to(tl.float32) < real.to(tl.float32) * FORM.enough


@triton.jit
def quantize(x, real, with_zeros, FORM: tl.constexpr):
    """One bit and more: scales; codes, a tile of int32; and the values of the codes.

    `with_zeros`: (blocks, 1), at 2 bits, whether any of a block's real gradients is zero.
    """
    if FORM.bits == 1:
        wide = tree_sum(tl.abs(x).to(tl.float64), FORM.rows, FORM.halvings) * 2.0 / tl.maximum(real, 1).to(tl.float64)
    else:
        reach = tl.full((1, 1), FORM.reach, tl.float64)
        wide = _maximum(x, FORM) * reach / tl.full((1, 1), FORM.top, tl.float64)
    scale = wide.to(tl.float32)
    number = scale == scale
    scale = up_to_bfloat16(scale)
    finite = number & (scale <= FORM.largest_scale)
    live = finite & (scale >= FORM.smallest_scale)

    if FORM.outer:
        three = live & (with_zeros | _few_reach(x, real, scale, FORM))
        step = scale * tl.where(three, FORM.outer * 0.5, FORM.outer * 0.5 + 0.5)
        outer = ((step.to(tl.int32, bitcast=True) - magnitude_bits(x)) >> 31) & 1
        codes = (outer | ((x.to(tl.int32, bitcast=True) >> 31) & 2)) * tl.where(three, outer, 1)
        codes = tl.where(live, codes, 0)
        scale = _on_the_wire(scale, live, finite)
        return tl.where(three, -scale, scale), codes, of_four(codes, three, FORM.outer) * scale

    q = x * inverse(scale, live)
    if FORM.fine:
        q = evenly(q, FORM.fine)
    k = floor(q) if FORM.mid_rise else nearest(q)
    k = tl.minimum(tl.maximum(k, -FORM.most), FORM.most - FORM.mid_rise)
    codes = (tl.where(live, k, 0.0) + FORM.most).to(tl.int32)
    scale = _on_the_wire(scale, live, finite)
    k = (codes - FORM.most).to(tl.float32)  # without a negative zero
    if FORM.mid_rise:
        k += 0.5
    elif FORM.fine:
        k = placed(k, FORM.fine)
    return scale, codes, k * scale


@triton.jit
def in_groups(FORM: tl.constexpr):
    """Below one bit: where a block's values are in the order of places, then groups: (1, block size)."""
    place = tl.arange(0, FORM.size)[None, :] // FORM.groups
    return place * FORM.groups + group_of(place, tl.arange(0, FORM.size)[None, :] % FORM.groups, FORM)


@triton.jit
def quantize_groups(x, real, FORM: tl.constexpr):
    """Below one bit, of a tile in the order of `in_groups`: scales; codes, (blocks, groups) int32; and the values."""
    apart = tl.reshape(x, (FORM.rows, FORM.group, FORM.groups))
    place = tl.arange(0, FORM.group)[None, :, None]
    # One number has the magnitude, the place (the first of several wins) and the sign; the largest number is chosen.
    rank = ((magnitude_bits(apart).to(tl.int64) << 6) | (FORM.group - 1 - place)) << 1
    rank = tl.max(rank | (apart.to(tl.int32, bitcast=True) < 0).to(tl.int64), axis=1)
    chosen = FORM.group - 1 - ((rank >> 1) & 63).to(tl.int32)
    largest = (rank >> 7).to(tl.int32).to(tl.float32, bitcast=True)

    counted = tl.minimum(tl.maximum(real, 1), FORM.groups).to(tl.float64)  # the groups that are not padding throughout
    mean = tree_sum(squares(largest), FORM.rows, FORM.group_halvings) / counted
    scale = weighted(tl.sqrt(mean), FORM.rms, _maximum(largest, FORM), FORM.maximum).to(tl.float32)
    number = scale == scale
    scale = to_bfloat16(scale)
    finite = number & (scale <= FORM.largest_scale)
    live = finite & (scale >= FORM.smallest_scale)
    k = tl.minimum(nearest(largest * inverse(scale, live)), FORM.most)
    k = tl.where(live, k, 0.0).to(tl.int32)
    negative = (rank & 1).to(tl.int32)
    codes = tl.where(k == 0, 0, chosen | (negative << FORM.place_bits) | (k << (FORM.place_bits + 1)))
    scale = _on_the_wire(scale, live, finite)

    signed = tl.where(negative == 1, -k, k).to(tl.float32)
    signed = tl.reshape(signed, (FORM.rows, 1, FORM.groups))
    chosen = tl.reshape(chosen, (FORM.rows, 1, FORM.groups))
    values = tl.reshape(tl.where(chosen == place, signed, 0.0), (FORM.rows, FORM.size)) * scale
    return scale, codes, values
