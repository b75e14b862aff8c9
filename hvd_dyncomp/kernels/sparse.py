"""Levels below one bit, in plain torch operators: the largest value of every group travels. Part of the reference.

A block is divided into n = block_size / g groups of g = 8 / bits values: 16, 32 or 64. A block is g rows of n values,
and each row has one value of every group: row s has that of group j in column j xor ((s xor s // n) mod n). So a group
has no neighbours and, as far as possible, no values that are a power of two apart, such as those of a column of a
matrix. On the wire a group is one byte: from its lowest bits up the place s of its largest magnitude, its sign, and its
magnitude as a multiple of the block's scale. A magnitude of zero sends nothing, and the byte is zero.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_dyncomp.kernels.scales import LARGEST_VALUE, SMALLEST_SCALE, tree_sum


class Magnitudes(NamedTuple):
    """The magnitudes that a level can send (equations 2c and 3d).

    Attributes:
        most: they are 0 to `most` times the scale.
        rms: the scale is rms * (root mean square) + maximum * (maximum) of the largest magnitudes of the groups.
        maximum: see `rms`.
    """

    most: int
    rms: float
    maximum: float


# docs/dev/experiments.md says how the constants were found.
MAGNITUDES = {0.5: Magnitudes(7, 0.22, 0.03), 0.25: Magnitudes(3, 0.40, 0.05), 0.125: Magnitudes(1, 0.80, 0.10)}


def group_size(bits: float) -> int:
    """Number of values in a group, of which one travels."""
    return round(8 / bits)


def encode(x: torch.Tensor, real: torch.Tensor, bits: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode blocks of values.

    Args:
        x: (blocks, block_size) float32.
        real: (blocks, 1), number of values of each block that count; the others are zero.
        bits: a level below one.

    Returns:
        The scales, (blocks, 1) float32 that bfloat16 can hold: 0 where a block counts as zero, NaN where it is not
        finite; and the codes, (blocks, block_size / group_size(bits)) uint8.
    """
    size, magnitudes = group_size(bits), MAGNITUDES[bits]
    places = size.bit_length() - 1  # bits of a place
    groups = x[:, _places(size, x.shape[1], x.device)].view(x.shape[0], size, -1)
    place = groups.abs().argmax(dim=1, keepdim=True)  # the first of several
    largest = groups.gather(1, place).squeeze(1)

    scale = _scale(largest, real, magnitudes)
    finite = scale <= LARGEST_VALUE / magnitudes.most  # False for NaN
    live = finite & (scale >= SMALLEST_SCALE)
    k = (largest * torch.where(live, 1 / scale, 0.0)).round().clamp(-magnitudes.most, magnitudes.most)  # to even
    k = torch.where(live, k, 0.0).to(torch.int32)
    codes = place.squeeze(1) | ((k < 0) << places) | (k.abs() << (places + 1))
    codes = torch.where(k == 0, 0, codes).to(torch.uint8)
    return torch.where(finite, torch.where(live, scale, 0.0), torch.nan), codes


def decode(codes: torch.Tensor, scale: torch.Tensor, bits: float) -> torch.Tensor:
    """Decode codes into values.

    Args:
        codes: (blocks, groups) uint8.
        scale: (blocks, 1) float32.
        bits: a level below one.

    Returns:
        (blocks, groups * group_size(bits)) float32.
    """
    size = group_size(bits)
    places = size.bit_length() - 1
    codes = codes.to(torch.int32).unsqueeze(1)
    k = codes >> (places + 1)
    k = torch.where((codes >> places) & 1 == 1, -k, k).to(torch.float32)
    here = (codes & (size - 1)) == torch.arange(size, device=codes.device).view(1, size, 1)
    k = torch.where(here, k, 0.0).flatten(1)
    return k[:, _places(size, k.shape[1], k.device)] * scale


def _places(size: int, block_size: int, device: torch.device) -> torch.Tensor:
    """(block_size,) int64: where the values of a block are in the order of places, then groups; and the inverse."""
    groups = block_size // size
    row, group = torch.arange(size, device=device).view(-1, 1), torch.arange(groups, device=device)
    return (row * groups + (group ^ ((row ^ row // groups) % groups))).view(-1)


def _scale(largest: torch.Tensor, real: torch.Tensor, magnitudes: Magnitudes) -> torch.Tensor:
    """Scale of every block from the largest values of its groups, (blocks, 1) float32 that bfloat16 can hold."""
    real = real.clamp(min=1, max=largest.shape[1]).to(torch.float64)  # the groups that are not padding throughout
    maximum = largest.abs().amax(dim=1, keepdim=True).to(torch.float64)  # NaN if there is one
    rms = (tree_sum(largest.to(torch.float64).square()) / real).sqrt()
    scale = (rms * magnitudes.rms + maximum * magnitudes.maximum).to(torch.float32)
    return scale.to(torch.bfloat16).to(torch.float32)  # to nearest, ties to even
