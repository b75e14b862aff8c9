"""Checks that kernels equal their specification bit for bit: every level, rounding, kind of value and of call.

Who checks some kernels registers them for the type of device that `device` is of (`serving`, or `native.using`). What
is expected always comes from the reference on the CPU.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS, kernels
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, reduce_into, reference

each_level = pytest.mark.parametrize("bits", [bits for bits in LEVELS if bits < 32])

BLOCK_SIZES = st.sampled_from([64, 128, 256, 512, 1024])
LARGEST = torch.finfo(torch.bfloat16).max
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 2.0**-126, 3e38, -3.4e38]
WORDS = st.integers(0, 2**32 - 1)


@st.composite
def blocks_of_values(draw, block_size, blocks, *, broken=True):
    """(blocks * block_size,) float32, 4-byte aligned only: blocks of every magnitude and of every kind."""
    generator = torch.Generator().manual_seed(draw(WORDS))
    parts = [torch.empty(0)]
    for _ in range(blocks):
        kind = draw(st.sampled_from(["random", "random", "ties", "constant", "lone", "zero", "special", "broken"]))
        scale = 2.0 ** draw(st.integers(-149, 127))
        part = torch.randn(block_size, generator=generator, dtype=torch.float64) * scale
        where = torch.randint(0, block_size, (draw(st.integers(1, block_size)),), generator=generator)
        if kind == "ties":  # halves and quarters of a scale of 5 and more bits
            part = torch.randint(-120, 121, (block_size,), generator=generator).double() * scale / 8
        elif kind == "constant":
            part[:] = part[0]
        elif kind == "lone":
            part[where[0]] *= 1024
        elif kind == "zero":
            part *= 0.0
        elif kind == "special":
            part[where] = draw(st.sampled_from(SPECIAL))
        elif kind == "broken" and broken:
            part[where[:3]] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
        parts.append(part.float())
    return at_odd_address(torch.cat(parts), draw(st.integers(0, 15)))


def at_odd_address(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    return torch.cat([tensor.new_zeros(elements), tensor])[elements:]


def copied(tensor: torch.Tensor, device: str, elements: int = 3) -> torch.Tensor:
    """A copy on the device, at an address of another kind."""
    return at_odd_address(tensor.to(device), elements)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN equals a NaN; a positive zero does not equal a negative one."""
    a, b = a.cpu(), b.cpu()
    if a.dtype in (torch.float32, torch.bfloat16):
        whole = torch.int32 if a.dtype == torch.float32 else torch.int16
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a[~nan].view(whole), b[~nan].view(whole)
    return torch.equal(a, b)


def dither(step: int) -> int:
    """Another word of 32 bits in every step."""
    return random.Random(step).getrandbits(32)


def residual_of(count: int) -> torch.Tensor:
    """Nothing owed, as it is kept."""
    return torch.zeros(count, dtype=torch.bfloat16)


class Guarded:
    """Memory of `size` bytes at any address, in the middle of bytes that nobody may write to."""

    def __init__(self, size: int, shift: int, device: str) -> None:
        self.memory = torch.full((size + 256,), 0xA5, dtype=torch.uint8, device=device)
        self.inside = self.memory[64 + shift : 64 + shift + size]
        self.shift = shift

    @classmethod
    def copy_of(cls, values: torch.Tensor, shift: int, device: str) -> "Guarded":
        """Bfloat16 values, `shift` elements further."""
        guarded = cls(2 * len(values), 2 * shift, device)
        guarded.residuals.copy_(values)
        return guarded

    @property
    def residuals(self) -> torch.Tensor:
        return self.inside.view(torch.bfloat16)

    @property
    def floats(self) -> torch.Tensor:
        return self.inside.view(torch.float32)

    def untouched_outside(self) -> bool:
        before, after = self.memory[: 64 + self.shift], self.memory[64 + self.shift + len(self.inside) :]
        return bool((before == 0xA5).all() and (after == 0xA5).all())


@contextmanager
def serving(backend, device: str) -> Iterator[None]:
    """Has some kernels serve a type of device."""
    with patch.dict(kernels.backends, {device: backend}):
        yield


@st.composite
def cuts(draw, count):
    """Where a sequence of `count` values is cut into tensors, some of them empty."""
    return sorted(draw(st.lists(st.integers(0, count), max_size=6)))


def pieces_of(tensor: torch.Tensor, at: list[int], device: str) -> list[torch.Tensor]:
    """The same values in tensors of their own, at addresses of their own."""
    return [copied(piece, device, 1 + i % 7) for i, piece in enumerate(torch.tensor_split(tensor, at))]


@st.composite
def residuals(draw, block_size, blocks, given, bits):
    """None, or what may be owed beside given values: of any kind, or at its bound, or nearly."""
    owed = draw(st.none() | blocks_of_values(block_size, blocks))
    if owed is not None and draw(st.booleans()):
        near = draw(st.sampled_from([1.0, 1 - 2.0**-8, 1 + 2.0**-8, 0.99, 1.01]))
        owed = given * (reference.residual_bound(bits) * near)
    return None if owed is None else owed.clamp(-LARGEST, LARGEST).bfloat16()


@st.composite
def payloads(draw, bits, block_size, blocks):
    """Encoded values, or any bytes at all: they come from another machine."""
    size = blocks * block_bytes(bits, block_size)
    if draw(st.booleans()):
        generator = torch.Generator().manual_seed(draw(WORDS))
        version = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)
    else:
        values = draw(blocks_of_values(block_size, blocks))
        version = reference.encode(values, None, bits=bits, block_size=block_size).view(-1)
    return at_odd_address(version, draw(st.integers(0, 15)))


def check_encode(data: st.DataObject, bits: float, device: str = "cpu", block_sizes=BLOCK_SIZES) -> None:
    block_size, blocks = data.draw(block_sizes), data.draw(st.integers(0, 5))
    count = blocks * block_size
    given = data.draw(blocks_of_values(block_size, blocks))
    owed, word = data.draw(residuals(block_size, blocks, given, bits)), data.draw(WORDS)
    residual = None if owed is None else Guarded.copy_of(owed, 3, device)
    out = Guarded(blocks * block_bytes(bits, block_size), data.draw(st.integers(0, 15)), device)
    missing = data.draw(st.just(0) | st.integers(0, count))  # at the end, where padding stands for them
    first = data.draw(st.sampled_from([0, 0, 1, 700]))
    more = data.draw(st.sampled_from([0, 0, 100])) if missing == 0 else 0  # than are quantized
    values = torch.cat([torch.full((first,), 7.0), given[: count - missing], torch.full((more,), 7.0)])
    pieces = pieces_of(values, data.draw(cuts(len(values))), device)
    before = [piece.clone() for piece in pieces]

    expected = reference.encode(given, owed, bits=bits, block_size=block_size, real=count - missing, dither=word)
    own = residual and residual.residuals
    encode_into(out.inside, pieces, own, bits=bits, block_size=block_size, first=first, dither=word)
    assert torch.equal(out.inside.cpu(), expected.view(-1)) and out.untouched_outside()
    assert residual is None or same_bits(residual.residuals, owed) and residual.untouched_outside()
    assert all(same_bits(a, b) for a, b in zip(pieces, before, strict=True))


def check_decode_and_reduce(data: st.DataObject, bits: float, device: str = "cpu", block_sizes=BLOCK_SIZES) -> None:
    block_size, blocks = data.draw(block_sizes), data.draw(st.integers(0, 4))
    versions = data.draw(st.lists(payloads(bits, block_size, blocks), min_size=1, max_size=4))
    factor = data.draw(st.sampled_from([1.0, 0.5, 1 / 3, 1e-30, 0.0]))
    shape = {"bits": bits, "block_size": block_size}
    rows = [version.view(blocks, block_bytes(bits, block_size)) for version in versions]
    versions = [copied(version, device, 5 * i + 2) for i, version in enumerate(versions)]
    count, first = blocks * block_size, data.draw(st.sampled_from([0, 0, 1, 700]))
    length = first + count + data.draw(st.integers(-min(count, 100), 100))  # less than is decoded, or more
    out = Guarded(4 * length, 4 * data.draw(st.integers(0, 15)), device)
    target = out.floats
    decode_into(torch.tensor_split(target, data.draw(cuts(length))), versions, first=first, factor=factor, **shape)
    expected = reference.decode_sum(rows, factor=factor, **shape)[: length - first]
    assert same_bits(target[first : first + count], expected) and out.untouched_outside()
    assert (out.inside[: 4 * first] == 0xA5).all() and (out.inside[4 * (first + count) :] == 0xA5).all()

    total = reference.decode_sum(rows, **shape)
    owed = data.draw(residuals(block_size, blocks, total, bits))
    residual = None if owed is None else Guarded.copy_of(owed, 1, device)
    message = Guarded(blocks * block_bytes(bits, block_size), data.draw(st.integers(0, 15)), device)
    real = data.draw(st.none() | st.integers(0, count + 100))
    word = data.draw(WORDS)
    reduce_into(message.inside, versions, residual and residual.residuals, real=real, dither=word, **shape)
    expected = reference.encode(total, owed, real=real, dither=word, **shape)
    assert torch.equal(message.inside.cpu(), expected.view(-1)) and message.untouched_outside()
    assert residual is None or same_bits(residual.residuals, owed) and residual.untouched_outside()


def check_large_blocks(bits: float, block_size: int, device: str = "cpu") -> None:
    gradient = torch.randn(3 * block_size, generator=torch.Generator().manual_seed(int(8 * bits)))
    owed = (gradient * 0.1).bfloat16()
    residual = copied(owed, device)
    shape = {"bits": bits, "block_size": block_size, "dither": 2**32 - 1}
    expected = reference.encode(gradient, owed, **shape)
    out = torch.empty_like(expected.view(-1), device=device)
    reduced = torch.empty_like(out)
    encode_into(out, [gradient.to(device)], residual, **shape)
    assert torch.equal(out.cpu(), expected.view(-1)) and same_bits(residual, owed)
    reduce_into(reduced, [out, out], residual, **shape)
    total = reference.decode_sum([expected, expected], bits=bits, block_size=block_size)
    assert torch.equal(reduced.cpu(), reference.encode(total, owed, **shape).view(-1)) and same_bits(residual, owed)


def check_squares_beyond_float32(bits: float, device: str = "cpu") -> None:
    """Where the squares overflow, the bound of a residual holds all the same."""
    gradient, owed = torch.zeros(64), torch.zeros(64)
    gradient[0], owed[1:3] = 1e19, 0.9e19 * reference.residual_bound(bits)
    owed = owed.bfloat16()
    residual = copied(owed, device)
    expected = reference.encode(gradient, owed, bits=bits, block_size=64).view(-1)
    out = torch.empty_like(expected, device=device)
    encode_into(out, [gradient.to(device)], residual, bits=bits, block_size=64)
    assert torch.equal(out.cpu(), expected) and same_bits(residual, owed)


def check_many_versions(bits: float, device: str = "cpu") -> None:
    """One version per rank, and ranks may be many."""
    versions = [reference.encode(torch.randn(1024), None, bits=bits, block_size=512) for _ in range(40)]
    out = torch.empty(1024, device=device)
    decode_into([out], [version.view(-1).to(device) for version in versions], bits=bits, block_size=512)
    assert same_bits(out, reference.decode_sum(versions, bits=bits, block_size=512))


def check_a_bucket_of_very_many_tensors(device: str = "cpu") -> None:
    tensors = [torch.randn(size) for size in (1, 63, 0, 64, 65, 1000) * 20]
    out = torch.empty(47 * block_bytes(2, 512), dtype=torch.uint8, device=device)
    decoded = [torch.empty_like(tensor, device=device) for tensor in tensors]
    encode_into(out, [tensor.to(device) for tensor in tensors], None, bits=2, block_size=512)
    decode_into(decoded, [out], bits=2, block_size=512)
    values = torch.cat([*tensors, torch.zeros(47 * 512)])[: 47 * 512]
    count = sum(map(len, tensors))
    expected = reference.encode(values, None, bits=2, block_size=512, real=count)
    assert torch.equal(out.cpu(), expected.view(-1))
    assert same_bits(torch.cat(decoded), reference.decode(expected, bits=2, block_size=512)[:count])


def check_sums_run_over_halves(device: str = "cpu") -> None:
    """In another order the two smallest values are lost one by one, and the sum is rounded down to a float32: a tie."""
    values = torch.zeros(64)
    values[[4, 36]], values[[5, 37]] = torch.tensor([2.0**24, 1.0]), 2.0**-29
    out = torch.empty(block_bytes(1, 64), dtype=torch.uint8, device=device)
    encode_into(out, [values.to(device)], None, bits=1, block_size=64)
    up = 2.0**24 + 2.0**17  # the next bfloat16
    assert kernels.scales(out, 1, 64).item() == up * 2.0 / 64


def check_few_real_values(bits: float, device: str = "cpu") -> None:
    """Fewer than a block has groups: means are over what is there."""
    for real in (0, 1, 3):
        values, owed = torch.randn(512, generator=torch.Generator().manual_seed(real)), residual_of(512)
        residual = copied(owed, device)
        expected = reference.encode(values, owed, bits=bits, block_size=512, real=real).view(-1)
        out = torch.empty_like(expected, device=device)
        encode_into(out, [values[:real].to(device)], residual, bits=bits, block_size=512)
        assert torch.equal(out.cpu(), expected) and same_bits(residual, owed)


def check_ties_of_bfloat16(device: str = "cpu") -> None:
    """Two scales that are in the middle between two of bfloat16: one goes up, one down, both to even."""
    magnitudes = 1 + torch.arange(2**18, dtype=torch.float32) * 2.0**-20
    bits = (magnitudes.double() * 0.80 + magnitudes.double() * 0.10).float().view(torch.int32)
    for odd in (0, 1):
        tie = magnitudes[(bits & 0x1FFFF) == 0x8000 + 0x10000 * odd][0]
        values = torch.full((512,), tie.item())
        expected = reference.encode(values, None, bits=0.125, block_size=512).view(-1)
        out = torch.empty_like(expected, device=device)
        encode_into(out, [values.to(device)], None, bits=0.125, block_size=512)
        assert torch.equal(out.cpu(), expected) and out[0] & 1 == 0
