"""What the compiler knows about blocks when it compiles a kernel: the reference's numbers for a level and block size.

A kernel gets them as one argument. Triton's cache of compiled kernels, which outlives the process, tells arguments
apart, but not what a kernel finds in other modules: after a change of the reference's constants it would return the old
kernel.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from hvd_dyncomp.kernels.reference import DITHER_STEP, DITHERS, ENOUGH, LARGEST_RESIDUAL, PLACEMENTS, residual_bound
from hvd_dyncomp.kernels.scales import LARGEST_VALUE, SCALE_BYTES, SMALLEST_SCALE, block_bytes
from hvd_dyncomp.kernels.sparse import MAGNITUDES, group_size

# A tile has this many values in one or more blocks, or is one larger block. There is a warp for so many values: 16 per
# lane. So a block of up to 512 values belongs to one warp, which waits for no other.
TILE = 512


@dataclass(frozen=True)
class Form:
    """The blocks that a kernel is compiled for.

    Attributes:
        bits: the level.
        size: values in a block.
        rows: blocks in a tile.
        bytes: of a block on the wire.
        scale_bytes: those of its scale.
        halvings: of a block until one value is left.
        most: the largest code: `Placement.half`, or `Magnitudes.most`.
        fine: `Placement.fine`; 0 below one bit.
        outer: `Placement.outer`; 0 below one bit.
        enough: `reference.ENOUGH`.
        mid_rise: as in `Placement`; False below one bit.
        rms: below one bit, in the scale, the weight of the root mean square.
        maximum: below one bit, in the scale, the weight of the maximum.
        reach: `Placement.reach`; 0 below one bit.
        top: where the outermost code is, in scales.
        bound: equation 1a's c.
        smallest_scale: a block whose scale is below counts as zero.
        largest_scale: a block whose scale is above counts as infinite.
        dithers, dither_step: what rounds residuals, see `reference.stored`.
        largest_residual: what larger ones become.
        group: below one bit, values of which one travels; otherwise 1.
        groups: in a block.
        group_halvings: of as many values as there are groups, until one is left.
        place_bits: below one bit, bits of a code that say which one of its group travels.
    """

    bits: float
    size: int
    rows: int
    bytes: int
    scale_bytes: int
    halvings: int
    most: int
    fine: int
    outer: int
    enough: float
    mid_rise: bool
    rms: float
    maximum: float
    reach: float
    top: float
    bound: float
    smallest_scale: float
    largest_scale: float
    dithers: int
    dither_step: int
    largest_residual: float
    group: int
    groups: int
    group_halvings: int
    place_bits: int

    @property
    def warps(self) -> int:
        """The number of warps that work on a tile."""
        return max(1, self.size // TILE)


@functools.cache
def form_of(bits: float, block_size: int) -> Form:
    """The form for a level below 32 and a block size."""
    group = group_size(bits) if bits < 1 else 1
    groups = block_size // group
    mid_rise, rms, maximum, reach, fine, outer = False, 0.0, 0.0, 0.0, 0, 0
    if bits < 1:
        most, rms, maximum = MAGNITUDES[bits]
        top = most
    else:
        most, mid_rise, reach, fine, outer = PLACEMENTS[int(bits)]
        top = PLACEMENTS[int(bits)].top
    return Form(
        bits=bits,
        size=block_size,
        rows=max(1, TILE // block_size),
        bytes=block_bytes(bits, block_size),
        scale_bytes=SCALE_BYTES,
        halvings=block_size.bit_length() - 1,
        most=most,
        fine=fine,
        outer=outer,
        enough=ENOUGH,
        mid_rise=mid_rise,
        rms=rms,
        maximum=maximum,
        reach=reach,
        top=float(top),
        bound=float(residual_bound(bits)),
        smallest_scale=SMALLEST_SCALE,
        largest_scale=LARGEST_VALUE / top,
        dithers=DITHERS,
        dither_step=DITHER_STEP,
        largest_residual=LARGEST_RESIDUAL,
        group=group,
        groups=groups,
        group_halvings=groups.bit_length() - 1,
        place_bits=group.bit_length() - 1,
    )
