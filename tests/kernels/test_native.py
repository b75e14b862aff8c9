"""The native kernels equal their specification bit for bit: every level, instruction set, rounding, kind of value."""

import shutil
import subprocess
import sys
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels import Noise, block_bytes, decode_into, encode_into, native, reduce_into, reference

needs_native = pytest.mark.skipif(native is None, reason="the package was installed without a C++ compiler")
each_level = pytest.mark.parametrize("bits", [bits for bits in LEVELS if bits < 32])
each_variant = pytest.mark.parametrize("variant", native.variants() if native else [])

BLOCK_SIZES = st.sampled_from([64, 128, 256, 512, 1024])
SPECIAL = [0.0, -0.0, 1e-45, -1e-40, 2.0**-100, 2.0**-126, 3e38, -3.4e38]
WORDS = st.integers(0, 2**32 - 1)


@st.composite
def blocks_of_values(draw, block_size, blocks, *, broken=True):
    """(blocks * block_size,) float32, 4-byte aligned only: blocks of every magnitude and of every kind."""
    generator = torch.Generator().manual_seed(draw(WORDS))
    parts = [torch.empty(0)]
    for _ in range(blocks):
        kind = draw(st.sampled_from(["random", "random", "ties", "constant", "zero", "special", "broken"]))
        scale = 2.0 ** draw(st.integers(-149, 127))
        part = torch.randn(block_size, generator=generator, dtype=torch.float64) * scale
        where = torch.randint(0, block_size, (draw(st.integers(1, block_size)),), generator=generator)
        if kind == "ties":  # halves and quarters of a scale of 5 and more bits
            part = torch.randint(-120, 121, (block_size,), generator=generator).double() * scale / 8
        elif kind == "constant":
            part[:] = part[0]
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


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN equals a NaN; a positive zero does not equal a negative one."""
    if a.dtype == torch.float32:
        nan = a.isnan()
        if not torch.equal(nan, b.isnan()):
            return False
        a, b = a[~nan].view(torch.int32), b[~nan].view(torch.int32)
    return torch.equal(a, b)


class Guarded:
    """Memory of `size` bytes at any address, in the middle of bytes that nobody may write to."""

    def __init__(self, size: int, shift: int) -> None:
        self.memory = torch.full((size + 256,), 0xA5, dtype=torch.uint8)
        self.inside = self.memory[64 + shift : 64 + shift + size]
        self.shift = shift

    def untouched_outside(self) -> bool:
        before, after = self.memory[: 64 + self.shift], self.memory[64 + self.shift + len(self.inside) :]
        return bool((before == 0xA5).all() and (after == 0xA5).all())


@st.composite
def cuts(draw, count):
    """Where a sequence of `count` values is cut into tensors, some of them empty."""
    return sorted(draw(st.lists(st.integers(0, count), max_size=6)))


def pieces_of(tensor: torch.Tensor, at: list[int]) -> list[torch.Tensor]:
    """The same values in tensors of their own, at addresses of their own."""
    return [at_odd_address(piece, 1 + i % 7) for i, piece in enumerate(torch.tensor_split(tensor, at))]


@needs_native
@each_variant
@each_level
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_encode(variant, bits, data):
    block_size, blocks = data.draw(BLOCK_SIZES), data.draw(st.integers(0, 5))
    count = blocks * block_size
    noise = data.draw(st.none() | st.builds(Noise, st.tuples(WORDS, WORDS), WORDS))
    given = data.draw(blocks_of_values(block_size, blocks))
    expected_residual = data.draw(st.none() | blocks_of_values(block_size, blocks))
    residual = None if expected_residual is None else at_odd_address(expected_residual, 3)
    out = Guarded(blocks * block_bytes(bits, block_size), data.draw(st.integers(0, 15)))
    missing = data.draw(st.just(0) | st.integers(0, count))  # at the end, where padding stands for them
    if expected_residual is not None and data.draw(st.booleans()):  # at its bound, or nearly
        near = data.draw(st.sampled_from([1.0, 1 - 2.0**-20, 1 + 2.0**-20, 0.99, 1.01]))
        expected_residual = given * (reference.residual_bound(bits) * near)
        residual = at_odd_address(expected_residual, 3)
    first = data.draw(st.sampled_from([0, 0, 1, 700]))
    pieces = pieces_of(torch.cat([torch.full((first,), 7.0), given[: count - missing]]), data.draw(cuts(count + first)))
    before = [piece.clone() for piece in pieces]

    expected = reference.encode(
        given, expected_residual, bits=bits, block_size=block_size, real=count - missing, noise=noise
    )
    with native.using(variant):
        encode_into(out.inside, pieces, residual, bits=bits, block_size=block_size, first=first, noise=noise)
    assert torch.equal(out.inside, expected.view(-1)) and out.untouched_outside()
    assert residual is None or same_bits(residual, expected_residual)
    assert all(same_bits(a, b) for a, b in zip(pieces, before, strict=True))


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


@needs_native
@each_variant
@each_level
@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_decode_and_reduce(variant, bits, data):
    block_size, blocks = data.draw(BLOCK_SIZES), data.draw(st.integers(0, 4))
    versions = data.draw(st.lists(payloads(bits, block_size, blocks), min_size=1, max_size=4))
    factor = data.draw(st.sampled_from([1.0, 0.5, 1 / 3, 1e-30, 0.0]))
    shape = {"bits": bits, "block_size": block_size}
    rows = [version.view(blocks, block_bytes(bits, block_size)) for version in versions]
    count, first = blocks * block_size, data.draw(st.sampled_from([0, 0, 1, 700]))
    length = first + count + data.draw(st.integers(-min(count, 100), 100))  # less than is decoded, or more
    out = Guarded(4 * length, 4 * data.draw(st.integers(0, 15)))
    target = out.inside.view(torch.float32)
    with native.using(variant):
        decode_into(torch.tensor_split(target, data.draw(cuts(length))), versions, first=first, factor=factor, **shape)
    expected = reference.decode_sum(rows, factor=factor, **shape)[: length - first]
    assert same_bits(target[first : first + count], expected) and out.untouched_outside()
    assert (out.inside[: 4 * first] == 0xA5).all() and (out.inside[4 * (first + count) :] == 0xA5).all()

    noise = data.draw(st.none() | st.builds(Noise, st.tuples(WORDS, WORDS), WORDS))
    expected_residual = data.draw(st.none() | blocks_of_values(block_size, blocks))
    residual = None if expected_residual is None else at_odd_address(expected_residual, 1)
    message = Guarded(blocks * block_bytes(bits, block_size), data.draw(st.integers(0, 15)))
    real = data.draw(st.none() | st.integers(0, count + 100))
    with native.using(variant):
        reduce_into(message.inside, versions, residual, real=real, noise=noise, **shape)
    expected = reference.encode(reference.decode_sum(rows, **shape), expected_residual, real=real, noise=noise, **shape)
    assert torch.equal(message.inside, expected.view(-1)) and message.untouched_outside()
    assert residual is None or same_bits(residual, expected_residual)


@needs_native
@each_variant
@each_level
@pytest.mark.parametrize("block_size", [2048, 65536])
def test_large_blocks(variant, bits, block_size):
    gradient = torch.randn(3 * block_size, generator=torch.Generator().manual_seed(int(8 * bits)))
    residual, expected_residual = gradient * 0.1, gradient * 0.1
    shape = {"bits": bits, "block_size": block_size}
    expected = reference.encode(gradient, expected_residual, **shape)
    out, reduced = torch.empty_like(expected.view(-1)), torch.empty_like(expected.view(-1))
    with native.using(variant):
        encode_into(out, [gradient], residual, **shape)
        assert torch.equal(out, expected.view(-1)) and same_bits(residual, expected_residual)
        reduce_into(reduced, [out, out], residual, **shape)
    total = reference.decode_sum([expected, expected], **shape)
    assert torch.equal(reduced, reference.encode(total, expected_residual, **shape).view(-1))
    assert same_bits(residual, expected_residual)


@needs_native
@each_variant
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("bits, block_size, versions", [(4, 512, 1), (0.5, 512, 2), (0.125, 64, 1), (0.25, 512, 3)])
def test_results_larger_than_the_caches(variant, shift, bits, block_size, versions):
    """Written past the caches where the address allows it; the last block is half a block short."""
    shape, count, size = {"bits": bits, "block_size": block_size}, 2**22 + block_size, block_bytes(bits, block_size)
    payloads = torch.randint(0, 256, (versions, count // block_size, size), dtype=torch.uint8)
    payloads[:, :, 3 if bits >= 1 else 1] = 0x3F  # scales about one
    values = at_odd_address(torch.zeros(count - block_size // 2), shift)
    with native.using(variant):
        decode_into([values], [version.view(-1) for version in payloads], **shape)
    expected = reference.decode_sum(list(payloads), **shape)
    assert same_bits(values, expected[: count - block_size // 2])


@needs_native
@each_variant
@each_level
def test_squares_beyond_float32(variant, bits):
    """What bounds a residual looks at squares in float32 first: where they overflow, the bound holds all the same."""
    gradient, residual = torch.zeros(64), torch.zeros(64)
    gradient[0], residual[1:3] = 1e19, 0.9e19 * reference.residual_bound(bits)
    expected_residual = residual.clone()
    expected = reference.encode(gradient, expected_residual, bits=bits, block_size=64).view(-1)
    out = torch.empty_like(expected)
    with native.using(variant):
        encode_into(out, [gradient], residual, bits=bits, block_size=64)
    assert torch.equal(out, expected) and same_bits(residual, expected_residual)


@needs_native
@each_variant
@pytest.mark.parametrize("bits", [0.125, 0.5, 3])
def test_more_versions_than_fit_the_usual_place(variant, bits):
    """One version per rank, and ranks may be many."""
    versions = [reference.encode(torch.randn(1024), None, bits=bits, block_size=512) for _ in range(40)]
    out = torch.empty(1024)
    with native.using(variant):
        decode_into([out], [version.view(-1) for version in versions], bits=bits, block_size=512)
    assert same_bits(out, reference.decode_sum(versions, bits=bits, block_size=512))


@needs_native
@each_variant
def test_a_bucket_of_very_many_tensors(variant):
    tensors = [torch.randn(size) for size in (1, 63, 0, 64, 65, 1000) * 20]
    out = torch.empty(47 * block_bytes(2, 512), dtype=torch.uint8)
    decoded = [torch.empty_like(tensor) for tensor in tensors]
    with native.using(variant):
        encode_into(out, tensors, None, bits=2, block_size=512)
        decode_into(decoded, [out], bits=2, block_size=512)
    values = torch.cat([*tensors, torch.zeros(47 * 512)])[: 47 * 512]
    count = sum(map(len, tensors))
    expected = reference.encode(values, None, bits=2, block_size=512, real=count)
    assert torch.equal(out, expected.view(-1))
    assert same_bits(torch.cat(decoded), reference.decode(expected, bits=2, block_size=512)[:count])


@pytest.mark.parametrize(
    "argument, value",
    [
        ("payload", torch.zeros(519, dtype=torch.uint8)),
        ("payload", torch.zeros(520, dtype=torch.int8)),
        ("payload", torch.zeros(1040, dtype=torch.uint8)[::2]),
        ("values", [torch.ones(1024).double()]),
        ("values", [torch.ones(512), torch.ones(1024)[::2]]),
        ("residual", torch.zeros(512)),
        ("residual", torch.zeros(1024, dtype=torch.int32)),
        ("bits", 9),
        ("bits", 0.75),
        ("bits", 4.0),
        ("bits", False),
        ("bits", 32),
        ("block_size", 32),
        ("block_size", 96),
        ("block_size", 2**17),
        ("first", -1),
    ],
)
def test_a_wrong_argument_is_named_before_memory_is_touched(argument, value):
    payload, values, residual = torch.zeros(2 * 260, dtype=torch.uint8), [torch.ones(1024)], torch.zeros(1024)
    given = {"payload": payload, "values": values, "residual": residual, "bits": 4, "block_size": 512, "first": 0}
    given[argument] = value
    payload, values, residual = given.pop("payload"), given.pop("values"), given.pop("residual")
    with pytest.raises(ValueError, match=f"^{'out' if argument == 'payload' else argument} must"):
        encode_into(payload, values, residual, **given)
    if argument != "residual":
        with pytest.raises(ValueError, match=f"^{'versions' if argument == 'payload' else argument} must"):
            decode_into(values, [payload], **given)
    given.pop("first")
    if argument not in ("values", "first"):
        with pytest.raises(ValueError, match=f"^{'versions' if argument == 'payload' else argument} must"):
            reduce_into(torch.zeros(520, dtype=torch.uint8), [payload], residual, **given)


def test_versions_of_different_lengths_or_none_are_an_error():
    versions = [torch.zeros(260, dtype=torch.uint8), torch.zeros(520, dtype=torch.uint8)]
    for wrong in (versions, versions[::-1], []):
        with pytest.raises(ValueError, match="^versions must"):
            decode_into([torch.zeros(1024)], wrong, bits=4, block_size=512)
    with pytest.raises(ValueError, match="^out must"):
        reduce_into(versions[0], versions[1:], None, bits=4, block_size=512)


@needs_native
def test_a_key_of_more_than_32_bits_is_refused():
    with pytest.raises(ValueError, match="noise.key"):
        encode_into(torch.zeros(260, dtype=torch.uint8), [], None, bits=4, block_size=512, noise=Noise((2**32, 0)))


@needs_native
def test_an_unknown_instruction_set_is_an_error():
    with pytest.raises(ValueError, match="no variant 'abacus'"), native.using("abacus"):
        pass


@needs_native
def test_other_threads_run_meanwhile():
    """The kernels do not hold the interpreter: in the time of one call another thread gets many turns."""
    gradient = torch.zeros(2**24)
    out = torch.empty(2**24 // 512 * block_bytes(4, 512), dtype=torch.uint8)
    turns, running = 0, True

    def work() -> None:
        nonlocal running
        encode_into(out, [gradient], None, bits=4, block_size=512)
        running = False

    thread = threading.Thread(target=work)
    before = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody takes the interpreter from a thread that does not hand it over
    try:
        thread.start()
        while running and thread.is_alive():
            turns += 1
            threading.Event().wait(1e-4)
    finally:
        sys.setswitchinterval(before)
    thread.join()
    assert turns >= 3


def test_where_there_is_a_compiler_the_native_kernels_are_built():
    if native is None and shutil.which("c++"):
        pytest.fail("installed with a compiler at hand, and yet without native kernels")


def test_without_the_extension_the_reference_serves_and_one_line_says_so():
    code = (
        "import sys; sys.modules['hvd_dyncomp.kernels._native'] = None\n"
        "import torch; from hvd_dyncomp.kernels import decode_into, encode_into, native, reduce_into\n"
        "assert native is None\n"
        "out, back = torch.empty(260, dtype=torch.uint8), torch.empty(512)\n"
        "encode_into(out, [torch.ones(512)], torch.zeros(512), bits=4, block_size=512)\n"
        "decode_into([back], [out], bits=4, block_size=512)\n"
        "reduce_into(out, [out.clone(), out.clone()], None, bits=4, block_size=512)\n"
        "assert (back - 1).abs().max() < 0.5\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("native kernels are missing") == 1 and len(done.stderr.splitlines()) == 1, done.stderr
