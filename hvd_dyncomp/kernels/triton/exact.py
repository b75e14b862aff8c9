"""Arithmetic that is the same on every device: sums in a fixed order, rounding, the bound of a residual.

A tile is (rows, block size): some blocks, one per row. Spelt out here is what the compiler must not choose: the order
of a sum; constants, which would be float32 next to a float64; and operations that flush numbers next to zero to zero,
or that are approximations.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tree_sum(x, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """Sums each row of 2^HALVINGS values by adding its halves until one value is left: (ROWS, 1).

    The order within `tl.sum` is the compiler's. But a sum of two values is the same in either order.
    """
    for step in tl.static_range(HALVINGS):
        x = tl.sum(tl.reshape(x, (ROWS, 2, 1 << (HALVINGS - 1 - step))), axis=1)
    return tl.reshape(x, (ROWS, 1))


@triton.jit
def squares(x):
    """Squares of float32 in float64, where they are exact."""
    wide = x.to(tl.float64)
    return wide * wide


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32: in the order of the magnitudes, NaN above infinity."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def weighted(x, X: tl.constexpr, y, Y: tl.constexpr):
    """x X + y Y in float64."""
    return x * tl.full((1, 1), X, tl.float64) + y * tl.full((1, 1), Y, tl.float64)


@triton.jit
def bound(gradient, residual, BOUND: tl.constexpr, ROWS: tl.constexpr, HALVINGS: tl.constexpr):
    """The factor of each row's residual (equation 1a), and whether the row waits because its gradient is zero."""
    own = tree_sum(squares(gradient), ROWS, HALVINGS)
    carried = tree_sum(squares(residual), ROWS, HALVINGS)
    exceeds = carried > own * tl.full((1, 1), BOUND * BOUND, tl.float64)  # False for NaN
    share = tl.sqrt(own / tl.where(exceeds, carried, 1.0)) * tl.full((1, 1), BOUND, tl.float64)
    return tl.where(exceeds, share, 1.0).to(tl.float32), own == 0.0


@triton.jit
def widened(x):
    """Float32 from the bits of bfloat16, int16."""
    return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def rounded_by(x, dithers, MOST: tl.constexpr):
    """The bits of bfloat16, int16, from float32. `dithers`: int32 of 16 bits (equation 1b). NaN stays as it is."""
    held = tl.where(x == x, tl.minimum(tl.maximum(x, -MOST), MOST), x)  # a GPU's maximum of NaN and 1 is 1
    return ((held.to(tl.int32, bitcast=True) + dithers) >> 16).to(tl.int16)


@triton.jit
def inverse(scale, live):
    """1 / scale where the block is live, 0 elsewhere.

    A quotient of float32s that was rounded to float64 rounds to the float32 that it would have been at once. Division
    in float32 is an approximation, and `tl.div_rn` of some versions of Triton takes the smallest results for zero.
    """
    one = tl.full((1, 1), 1.0, tl.float64)
    return tl.where(live, (one / tl.where(live, scale, 1.0).to(tl.float64)).to(tl.float32), 0.0)


@triton.jit
def nearest(q):
    """Rounds to nearest, ties to even, |q| < 2^22: in 1.5 * 2^23 + q there is no bit for a fraction. Keeps -0."""
    k = (q + 12582912.0) - 12582912.0
    return (k.to(tl.int32, bitcast=True) | (q.to(tl.int32, bitcast=True) & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def floor(q):
    """The largest integer that is not above q, |q| < 2^22. `tl.floor` may take what is next to zero for zero."""
    k = nearest(q)
    return tl.where(k > q, k - 1.0, k)


@triton.jit
def to_bfloat16(x):
    """Round to a bfloat16, to nearest, ties to even. A NaN may become anything."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def up_to_bfloat16(x):
    """The next bfloat16 that is not smaller. `x` is not negative; a NaN may become anything."""
    return ((x.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def with_sign(size, x):
    """The magnitude of one with the sign of the other, which may be a zero's."""
    signs = x.to(tl.int32, bitcast=True) & -0x80000000
    return (size.to(tl.int32, bitcast=True) | signs).to(tl.float32, bitcast=True)


@triton.jit
def evenly(q, FINE: tl.constexpr):
    """`reference._evenly`; a NaN may become anything."""
    size = tl.abs(q)
    return with_sign(tl.minimum(size, tl.minimum(size * 0.5 + FINE * 0.5, size * 0.25 + FINE)), q)


@triton.jit
def of_four(codes, three, OUTER: tl.constexpr):
    """`reference._of_four`, without the scale."""
    size = tl.where((codes & 1) == 1, OUTER * 1.0, tl.where(three, 0.0, 1.0))
    return (size.to(tl.int32, bitcast=True) | ((codes & 2) << 30)).to(tl.float32, bitcast=True)  # -0, too


@triton.jit
def placed(k, FINE: tl.constexpr):
    """The inverse of `evenly`, in `reference._values`."""
    size = tl.abs(k)
    return with_sign(tl.maximum(size, tl.maximum(size * 2.0 - FINE, size * 4.0 - FINE * 4.0)), k)
