"""The arithmetic in plain torch operators: the specification that every other kernel equals bit for bit.

All operations are IEEE float32 or float64 with the default rounding, without fused multiply-add, in the order written
here. Residuals alone are stored as bfloat16, rounded by `stored`. Sums run over a fixed tree (`tree_sum`), because an
addition in another order gives other bits. Equation numbers are those of docs/math.md. Tensors may be on any device;
all are contiguous.

A block is `block_size` consecutive values with one scale. (A bucket's block is several of these from one bit on, see
`scales.values_per_scale`.) On the wire it is `2 + block_size * bits / 8` bytes: the scale as little-endian bfloat16,
then the codes, packed as `packing.pack` says, or below one bit what `sparse` makes of the values. The last block of a
bucket may be filled up with *padding*: zeros that belong to nobody, have no residual and count in no mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hvd_dyncomp.kernels import scales, sparse
from hvd_dyncomp.kernels.packing import pack, unpack
from hvd_dyncomp.kernels.scales import LARGEST_VALUE, SCALE_BYTES, SMALLEST_SCALE, block_bytes, rounded_up, tree_sum

# What a residual adds to a block has at most this many times the norm of the block's gradient (equation 1a), from one
# bit on; below one bit see `residual_bound`. docs/dev/experiments.md says how it was found.
RESIDUAL_BOUND = 2.0

# How residuals are rounded (`stored`): the values of a block take turns with so many dithers. Each dither is the one
# before plus this step, 2^32 over the golden ratio: this spreads the dithers of many blocks evenly.
DITHERS = 4
DITHER_STEP = 0x9E3779B1
RESIDUAL_DTYPE = torch.bfloat16
LARGEST_RESIDUAL = torch.finfo(RESIDUAL_DTYPE).max


class Placement(NamedTuple):
    """The places of a level's codes, as multiples of the scale (equations 2 and 3).

    Attributes:
        half: mid-rise codes are -half <= k < half, mid-tread codes -half <= k <= half.
        mid_rise: 2^b codes and none at zero; otherwise 2^b - 1 codes with one at zero.
        reach: the outermost code is at this part of the block's maximum, and what is beyond is clipped.
        fine: up to this code, codes are one scale apart; the next fine / 2 are two scales apart, and those behind them
            four. 0: all are one scale apart.
        outer: two bits are a sign, and whether a value is so many scales from zero, or one. 0: other codes.
    """

    half: int
    mid_rise: bool = False
    reach: float = 1.0
    fine: int = 0
    outer: int = 0

    @property
    def top(self) -> int:
        """Where the outermost code is. (At 1 bit, half a scale closer to zero.)"""
        return self.outer or (4 * (self.half - self.fine) if self.fine else self.half)


# At 2 bits, three codes serve blocks in which fewer than this part of the values are at least half of the inner code.
ENOUGH = 0.5

# With error feedback it is the largest values of a block that must arrive at once, whatever that costs the others; and
# with few codes, the small values want them: docs/dev/experiments.md says why. At 2 bits the sign of a scale says that
# a block has three codes: zeros stay zeros there. At 4 bits the places are those of the number format E2M1. One bit has
# its own rule; levels below one bit have `sparse.MAGNITUDES`.
PLACEMENTS = {
    1: Placement(1, mid_rise=True, reach=0.0),
    2: Placement(0, reach=0.7, outer=4),
    **{bits: Placement(2 ** (bits - 1) - 1, fine=2 ** (bits - 2)) for bits in (3, 4, 5, 6, 7)},
    **{bits: Placement(2 ** (bits - 1) - 1) for bits in (8, 16)},
}


def residual_bound(bits: float) -> float:
    """Equation 1a's c. Larger below one bit: there a value waits for about 8 / bits steps until it travels."""
    return RESIDUAL_BOUND / min(bits, 1)


def encode(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    *,
    bits: float,
    block_size: int,
    real: int | None = None,
    dither: int = 0,
) -> torch.Tensor:
    """Quantize gradient + residual; what is lost becomes the new residual (equations 1 and 1b).

    The block's gradient bounds what a residual adds to the block (`residual_bound`); the rest is dropped. Blocks with
    an all-zero gradient decode to zeros and keep their residual: what is owed to parameters that are frozen, or unused
    in this step, waits until they are used again. Blocks with a NaN, an infinity, or values so large that a code would
    overflow (`LARGEST_VALUE`) decode to NaN everywhere and keep their residual, too.

    Args:
        gradient: (n,) float32, n a multiple of `block_size`.
        residual: (n,) bfloat16, updated in place; None for no error feedback.
        bits: a level below 32.
        block_size: values per block, a power of two of at least 8.
        real: number of values that count; the others are padding, whatever they are, and have a residual of zero. None:
            all.
        dither: decides how the new residual is rounded, see `stored`.

    Returns:
        (n / block_size, block_bytes(bits, block_size)) uint8.
    """
    if gradient.numel() == 0:  # a shard of a bucket with fewer blocks than workers
        return torch.empty(0, block_bytes(bits, block_size), dtype=torch.uint8, device=gradient.device)
    is_real = torch.arange(gradient.numel(), device=gradient.device).view(-1, block_size) < (
        gradient.numel() if real is None else real
    )
    x = torch.where(is_real, gradient.view_as(is_real), 0.0)
    with_zeros = ((x == 0) & is_real).any(dim=1, keepdim=True)
    if residual is not None:
        own = residual.view_as(x)
        own.masked_fill_(~is_real, 0.0)
        before = own.to(torch.float32)
        x, waits = _add(x, before, residual_bound(bits))
    real_values = is_real.sum(dim=1, keepdim=True)
    if bits < 1:
        scale, codes = sparse.encode(x, real_values, bits)
        decoded = sparse.decode(codes, scale, bits)
    else:
        scale, codes, decoded = _encode_each(x, real_values, with_zeros, int(bits))
    if residual is not None:
        finite = ~scale.isnan()
        lost = torch.where(finite & ~waits & is_real, x - decoded, before)
        own.copy_(stored(lost, dither))  # an unchanged residual is bfloat16 already, and stays the same
    return torch.cat([scales.to_bytes(scale), codes], dim=1)


def _encode_each(
    x: torch.Tensor, real: torch.Tensor, with_zeros: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One bit and more: scales, 0 or NaN where a block is zero or not finite; packed codes; their values.

    Args:
        with_zeros: (blocks, 1), whether any of the block's real gradients is zero.
    """
    placement = PLACEMENTS[bits]
    scale = _scale(x, real, bits)
    finite = scale <= LARGEST_VALUE / placement.top  # False for NaN
    live = finite & (scale >= SMALLEST_SCALE)
    # A NaN scale on the wire makes the whole block NaN when it is decoded.
    sent = torch.where(finite, torch.where(live, scale, 0.0), torch.nan)
    if placement.outer:
        three = live & (with_zeros | _few_reach(x, real, scale))
        codes = _inner_or_outer(x, scale, live, three, placement.outer)
        return torch.where(three, -sent, sent), pack(codes, bits), _of_four(codes, sent, three, placement.outer)
    k = _round(x, torch.where(live, 1 / scale, 0.0), placement)
    k = torch.where(live, k, 0.0) + 0.0  # a code has no negative zero
    return sent, pack((k + placement.half).to(torch.int32), bits), _values(k, sent, placement)


def _inner_or_outer(
    x: torch.Tensor, scale: torch.Tensor, live: torch.Tensor, three: torch.Tensor, outer: int
) -> torch.Tensor:
    """Codes of two bits, int32 (equation 2e): whether it is an outer one, and its sign. `three`: (blocks, 1)."""
    is_outer = x.abs() > scale * torch.where(three, outer / 2, (1 + outer) / 2).to(torch.float32)
    codes = is_outer.to(torch.int32) | (torch.signbit(x).to(torch.int32) << 1)
    return torch.where(live & (is_outer | ~three), codes, 0)


def _of_four(codes: torch.Tensor, scale: torch.Tensor, three: torch.Tensor, outer: int) -> torch.Tensor:
    """The values of codes of two bits."""
    inner = torch.where(three, 0.0, 1.0).to(torch.float32)  # whatever the program's default dtype is
    size = torch.where(codes & 1 == 1, float(outer), inner)
    return torch.where(codes & 2 == 2, -size, size) * scale


def _few_reach(x: torch.Tensor, real: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(blocks, 1), whether few values are as large as half of the inner code: to the others it would be noise."""
    reaching = (x.abs() >= scale * 0.5).sum(dim=1, keepdim=True)  # no padding among them, in a live block
    return reaching < real * ENOUGH


def stored(residual: torch.Tensor, dither: int) -> torch.Tensor:
    """Store a residual: bfloat16, rounded up or down at random, right on average (equation 1b).

    With rounding to nearest, a gradient below 1/512 of its residual would add nothing, step after step. So a number of
    16 bits, the dither, is added below the last bit that is kept, and the rest is cut off. The dither of value i of
    block b is the upper half of `dither` + (4 b + i mod 4) * DITHER_STEP, modulo 2^32: uniform, if `dither` is. The
    caller draws `dither` anew for every step. Values of a block may share one, because it decides about at most 1/128
    of each.

    Args:
        residual: (blocks, block_size) float32. Magnitudes above the largest bfloat16 become that one.
        dither: a word of 32 bits.
    """
    block, value = (torch.arange(size, dtype=torch.int64, device=residual.device) for size in residual.shape)
    index = block.view(-1, 1) * DITHERS + value % DITHERS
    added = ((index * DITHER_STEP + dither) & 0xFFFFFFFF) >> 16
    bits = residual.clamp(-LARGEST_RESIDUAL, LARGEST_RESIDUAL).view(torch.int32) + added.to(torch.int32)
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def dither_from(dither: int, first: int) -> int:
    """The dither of a call that begins with block `first` of those that `dither` is for."""
    return (dither + first * DITHERS * DITHER_STEP) & 0xFFFFFFFF


def decode(payload: torch.Tensor, *, bits: float, block_size: int, factor: float = 1.0) -> torch.Tensor:
    """Decode `payload`. `factor` is multiplied into the scales (equation 4).

    Args:
        payload: (blocks, block_bytes(bits, block_size)) uint8.

    Returns:
        (blocks * block_size,) float32.
    """
    if payload.numel() == 0:
        return torch.empty(0, dtype=torch.float32, device=payload.device)
    scale = scales.scales(payload, bits, block_size).view(-1, 1)
    codes = payload[:, SCALE_BYTES:]
    if bits == 2:
        outer, three = PLACEMENTS[2].outer, torch.signbit(scale)
        return _of_four(unpack(codes, 2, block_size), scale.abs() * factor, three, outer).view(-1)
    scale = scale * factor
    if bits < 1:
        return sparse.decode(codes, scale, bits).view(-1)
    placement = PLACEMENTS[int(bits)]
    k = unpack(codes, int(bits), block_size).to(torch.float32) - placement.half
    return _values(k, scale, placement).view(-1)


def decode_sum(payloads: Sequence[torch.Tensor], *, bits: float, block_size: int, factor: float = 1.0) -> torch.Tensor:
    """The sum of several versions of the same blocks, added in the order given (equation 5).

    Args:
        payloads: per version, (blocks, block_bytes(bits, block_size)) uint8.
        factor: as in `decode`.

    Returns:
        (blocks * block_size,) float32.
    """
    total = decode(payloads[0], bits=bits, block_size=block_size, factor=factor)
    for payload in payloads[1:]:
        total += decode(payload, bits=bits, block_size=block_size, factor=factor)
    return total


def _add(gradient: torch.Tensor, residual: torch.Tensor, bound: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient + bounded residual of every block (equation 1a); and whether the block waits: its gradient is zero."""
    squares = [tree_sum(x.to(torch.float64).square()) for x in (gradient, residual)]
    exceeds = squares[1] > bound**2 * squares[0]  # False for NaN
    factor = torch.where(exceeds, bound * (squares[0] / squares[1]).sqrt(), 1.0).to(torch.float32)
    waits = squares[0] == 0
    return torch.where(waits, 0.0, gradient + residual * factor), waits


def _scale(x: torch.Tensor, real: torch.Tensor, bits: int) -> torch.Tensor:
    """Scale of every block of `x`, (blocks, 1) float32 that bfloat16 can hold (equation 3); float64 inside.

    Args:
        real: (blocks, 1), how many values of the block count; the others are zero.
    """
    placement = PLACEMENTS[bits]
    real = real.clamp(min=1).to(torch.float64)
    maximum = x.abs().amax(dim=1, keepdim=True).to(torch.float64)  # NaN if there is one
    scale = maximum * placement.reach / placement.top
    if bits == 1:
        scale = tree_sum(x.abs().to(torch.float64)) * 2.0 / real
    return rounded_up(scale.to(torch.float32))


def _round(x: torch.Tensor, inverse: torch.Tensor, placement: Placement) -> torch.Tensor:
    """Integers k as float32, clipped to the placement's range (equation 2)."""
    q = _evenly(x * inverse, placement.fine)
    k = q.floor() if placement.mid_rise else q.round()  # to even
    return k.clamp(-placement.half, placement.half - placement.mid_rise)


def _evenly(q: torch.Tensor, fine: int) -> torch.Tensor:
    """Multiples of the scale, in the number of codes that they are from zero: linear between any two codes."""
    if not fine:
        return q
    size = q.abs()
    return torch.minimum(size, torch.minimum(size * 0.5 + fine * 0.5, size * 0.25 + fine)).copysign(q)


def _values(k: torch.Tensor, scale: torch.Tensor, placement: Placement) -> torch.Tensor:
    if placement.mid_rise:
        return (k + 0.5) * scale
    if placement.fine:  # the inverse of `_evenly`
        size = k.abs()
        farther = torch.maximum(size * 2 - placement.fine, size * 4 - placement.fine * 4)
        k = torch.maximum(size, farther).copysign(k)
    return k * scale
