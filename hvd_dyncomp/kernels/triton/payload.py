"""Blocks on the wire: their scales and codes, byte by byte, because a payload may begin at any address.

`payload` points to the first block of a tile, of which `count` blocks exist. Tiles are (blocks, block size).
"""

from __future__ import annotations

import triton
import triton.language as tl

from hvd_dyncomp.kernels.triton.exact import of_four, placed


@triton.jit
def write_scale(payload, scale, count, FORM: tl.constexpr):
    """Writes scales, (blocks, 1) float32: their upper halves."""
    row = tl.arange(0, FORM.rows)[:, None]
    byte = tl.arange(0, FORM.scale_bytes)[None, :]
    bits = scale.to(tl.int32, bitcast=True) >> (8 * (byte + 4 - FORM.scale_bytes))
    tl.store(payload + row * FORM.bytes + byte, bits.to(tl.uint8), mask=row + byte * 0 < count)


@triton.jit
def read_scale(payload, count, FORM: tl.constexpr):
    """The scales, (blocks, 1) float32."""
    row = tl.arange(0, FORM.rows)[:, None]
    byte = tl.arange(0, FORM.scale_bytes)[None, :]
    parts = tl.load(payload + row * FORM.bytes + byte, mask=row + byte * 0 < count, other=0)
    bits = tl.sum(parts.to(tl.int32) << (8 * (byte + 4 - FORM.scale_bytes)), axis=1)
    return tl.reshape(bits, (FORM.rows, 1)).to(tl.float32, bitcast=True)


@triton.jit
def write_packed(payload, codes, count, FORM: tl.constexpr):
    """Packs codes, a tile of int32 in [0, 2^bits), as `packing.pack` does."""
    row = tl.arange(0, FORM.rows)[:, None]
    start = payload + row * FORM.bytes + FORM.scale_bytes
    if FORM.bits == 16:
        halves = tl.reshape(tl.join(codes & 255, codes >> 8), (FORM.rows, 2 * FORM.size))
        byte = tl.arange(0, 2 * FORM.size)[None, :]
        tl.store(start + byte, halves.to(tl.uint8), mask=row + byte * 0 < count)
    else:
        for i in tl.static_range(4):
            if FORM.bits & (8 >> i):  # a section of fields of so many bits, behind those of wider ones
                fields = (codes >> (FORM.bits & (-16 >> i))) & ((1 << (8 >> i)) - 1)
                apart = tl.reshape(fields, (FORM.rows, 1 << i, FORM.size >> i))
                section = tl.sum(apart << (tl.arange(0, 1 << i)[None, :, None] * (8 >> i)), axis=1)
                byte = tl.arange(0, FORM.size >> i)[None, :]
                to = start + FORM.size // 8 * (FORM.bits & (-16 >> i)) + byte
                tl.store(to, section.to(tl.uint8), mask=row + byte * 0 < count)


@triton.jit
def write_bytes(payload, codes, count, FORM: tl.constexpr):
    """Below one bit: writes codes, (blocks, groups) int32, each a byte."""
    row = tl.arange(0, FORM.rows)[:, None]
    byte = tl.arange(0, FORM.groups)[None, :]
    to = payload + row * FORM.bytes + FORM.scale_bytes + byte
    tl.store(to, codes.to(tl.uint8), mask=row + byte * 0 < count)


@triton.jit
def _read_packed(start, at, wanted, FORM: tl.constexpr):
    codes = at * 0
    if FORM.bits == 16:
        codes = tl.load(start + 2 * at, mask=wanted, other=0).to(tl.int32)
        codes |= tl.load(start + 2 * at + 1, mask=wanted, other=0).to(tl.int32) << 8
    else:
        for i in tl.static_range(4):
            if FORM.bits & (8 >> i):
                byte = FORM.size // 8 * (FORM.bits & (-16 >> i)) + at % (FORM.size >> i)
                fields = tl.load(start + byte, mask=wanted, other=0).to(tl.int32)
                fields = (fields >> (at // (FORM.size >> i) * (8 >> i))) & ((1 << (8 >> i)) - 1)
                codes |= fields << (FORM.bits & (-16 >> i))
    return codes


@triton.jit
def group_of(row, column, FORM: tl.constexpr):
    """Below one bit: the group of the value in this row and column of a block; and the column of this row and group."""
    return column ^ ((row ^ (row // FORM.groups)) % FORM.groups)


@triton.jit
def _read_groups(start, at, wanted, FORM: tl.constexpr):
    place = at // FORM.groups
    group = group_of(place, at % FORM.groups, FORM)
    code = tl.load(start + group, mask=wanted, other=0).to(tl.int32)
    k = code >> (FORM.place_bits + 1)
    k = tl.where(((code >> FORM.place_bits) & 1) == 1, -k, k)
    return tl.where((code & (FORM.group - 1)) == place, k, 0)


@triton.jit
def decode(payload, factor, at, count, FORM: tl.constexpr):
    """The values number `at` of each block, a tile, times `factor`."""
    row = tl.arange(0, FORM.rows)[:, None]
    wanted = row + at * 0 < count
    start = payload + row * FORM.bytes + FORM.scale_bytes
    scale = read_scale(payload, count, FORM)
    three = scale.to(tl.int32, bitcast=True) < 0
    if FORM.outer:
        scale = (scale.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    scale = scale * factor
    if FORM.bits < 1:
        k = _read_groups(start, at, wanted, FORM).to(tl.float32)
    else:
        codes = _read_packed(start, at, wanted, FORM)
        k = of_four(codes, three, FORM.outer) if FORM.outer else codes.to(tl.float32) - FORM.most
        if FORM.mid_rise:
            k += 0.5
        elif FORM.fine:
            k = placed(k, FORM.fine)
    return k * scale


@triton.jit
def decode_sum(table, versions, offset, factor, at, count, FORM: tl.constexpr):
    """The same of several versions, added in their order. `table`: int64, their addresses; `offset`: of the payload."""
    first = tl.load(table).to(tl.pointer_type(tl.uint8)) + offset
    total = decode(first, factor, at, count, FORM)
    for version in range(1, versions):
        payload = tl.load(table + version).to(tl.pointer_type(tl.uint8)) + offset
        total += decode(payload, factor, at, count, FORM)
    return total
