"""The place of values in the tensors of a bucket, by a table of addresses.

The table is int64: the addresses of the tensors that are not empty, then the index of each one's first value, then the
number of values in all. A tile finds its first tensor by bisection and goes on from there. So in a bucket of a thousand
tensors a tile pays only for those that it touches, and no value is copied on its way.

Addresses are only assumed to be multiples of four, as a float32's are. So lanes have neighbouring values: every access
of a warp covers whole sectors, and the first halvings of a sum stay within a lane.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tensor_of(starts, count, index):
    """The tensor that has value number `index`; the last one, if none has."""
    low = count * 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        before = tl.load(starts + middle) <= index
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def read(table, count, begin, at, size):
    """The values number begin + at, for 0 <= at < `size` (int32, any shape); 0 elsewhere and after the last tensor."""
    x = at.to(tl.float32) * 0.0
    which = _tensor_of(table + count, count, begin)
    start = tl.load(table + count + which)
    while (which < count) & (start < begin + size):
        stop = tl.load(table + count + which + 1)
        here = (at >= tl.maximum(start - begin, 0).to(tl.int32)) & (at < tl.minimum(stop - begin, size).to(tl.int32))
        values = tl.load(table + which).to(tl.pointer_type(tl.float32)) + (begin - start)
        x = tl.load(values + at, mask=here, other=x)
        which += 1
        start = stop
    return x


@triton.jit
def write(table, count, begin, at, size, x):
    """Write x to the values that `read` reads."""
    which = _tensor_of(table + count, count, begin)
    start = tl.load(table + count + which)
    while (which < count) & (start < begin + size):
        stop = tl.load(table + count + which + 1)
        here = (at >= tl.maximum(start - begin, 0).to(tl.int32)) & (at < tl.minimum(stop - begin, size).to(tl.int32))
        values = tl.load(table + which).to(tl.pointer_type(tl.float32)) + (begin - start)
        tl.store(values + at, x, mask=here)
        which += 1
        start = stop
