"""How codes of a few bits are packed into bytes."""

from __future__ import annotations

import torch


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes of `bits` bits; planar, so that it vectorizes.

    16-bit codes are little-endian words. Below that, the bits of a code, from the lowest, are divided into fields of 8,
    4, 2 and 1 bits, as the binary digits of `bits` say (7 = 4 + 2 + 1). Every field has its own section, in that order.
    A section of fields of w bits has m = n * w / 8 bytes; byte j holds the fields of codes j, j + m, j + 2m ... from
    its lowest bits up.

    Args:
        codes: (blocks, n) int32 in [0, 2^bits).

    Returns:
        (blocks, n * bits / 8) uint8.
    """
    if bits == 16:
        return torch.stack([codes & 255, codes >> 8], dim=2).to(torch.uint8).flatten(1)
    sections = []
    for width, shift in _fields(bits):
        fields = ((codes >> shift) & ((1 << width) - 1)).view(codes.shape[0], 8 // width, -1)
        section = fields[:, 0]
        for i in range(1, 8 // width):
            section = section | (fields[:, i] << (width * i))
        sections.append(section.to(torch.uint8))
    return torch.cat(sections, dim=1)


def unpack(packed: torch.Tensor, bits: int, block_size: int) -> torch.Tensor:
    """The inverse of `pack`: (blocks, block_size) int32."""
    packed = packed.to(torch.int32)
    if bits == 16:
        return packed[:, 0::2] | (packed[:, 1::2] << 8)
    codes = torch.zeros(packed.shape[0], block_size, dtype=torch.int32, device=packed.device)
    start = 0
    for width, shift in _fields(bits):
        end = start + block_size * width // 8
        section = packed[:, start:end]
        fields = torch.cat([(section >> (width * i)) & ((1 << width) - 1) for i in range(8 // width)], dim=1)
        codes |= fields << shift
        start = end
    return codes


def _fields(bits: int) -> list[tuple[int, int]]:
    """(width, shift) of the sections of a code of `bits` < 16 bits."""
    fields, shift = [], 0
    for width in (8, 4, 2, 1):
        if bits & width:
            fields.append((width, shift))
            shift += width
    return fields
