"""Levels of 1/2, 1/4 and 1/8 bit: of every group of values the largest travels, and what is said of all others."""

import math

import pytest
import torch
from equality import dither, residual_of
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, native, portable, scales, sparse
from hvd_dyncomp.kernels.reference import decode, decode_sum, encode, stored

each_level = pytest.mark.parametrize("bits", [bits for bits in LEVELS if bits < 1])
SEEDS = st.integers(0, 2**32 - 1)
B = 512


@pytest.fixture(params=[portable, native] if native else [portable])
def backend(request, monkeypatch):
    monkeypatch.setattr("hvd_dyncomp.kernels.backends", {"cpu": request.param})


def gauss(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def group_of(bits: float, block_size: int) -> torch.Tensor:
    """(block_size,): the group that each value of a block is in, by the formula of docs/wire_format.md."""
    n = int(block_size * bits / 8)
    return torch.tensor([i % n ^ (i // n ^ i // n // n) % n for i in range(block_size)])


def groups(x: torch.Tensor, bits: float, block_size: int) -> torch.Tensor:
    """(blocks, places in a group, groups)."""
    of = group_of(bits, block_size)
    each = [x.view(-1, block_size)[:, of == group] for group in range(int(block_size * bits / 8))]
    return torch.stack(each, dim=2)


def decoded(payload: torch.Tensor, bits: float, block_size: int = B) -> torch.Tensor:
    return decode(payload.view(-1, block_bytes(bits, block_size)), bits=bits, block_size=block_size)


# Block size, values of a block by index, bytes: place, sign and magnitude of every group behind the scale.
GOLDEN = {
    # Groups of 16, four of them: 3 at place 0, -1 at place 5, 1/2 at places 3 and 9, too little at place 15.
    0.5: (64, {0: 3.0, 4 * 5 + 1: -1.0, 4 * 3 + 1: 0.5, 4 * 9 + 1: -0.5, 4 * 15 + 3: 0.01}, "e23e e0 55 23 00"),
    # Groups of 32, two of them: -5 at place 17, 2 at place 1.
    0.25: (64, {2 * 17 + 1: -5.0, 2 * 1: 2.0}, "e33f f1 41"),
    # Groups of 64, two of them: 2 at place 40, -1.9 at place 63.
    0.125: (128, {2 * 40: 2.0, 2 * 63 + 1: -1.9}, "e13f a8 ff"),
}


@pytest.mark.usefixtures("backend")
@each_level
def test_bytes_of_a_block(bits):
    """Made by hand, so that the layout cannot change unnoticed."""
    block_size, given, text = GOLDEN[bits]
    expected, x = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8), torch.zeros(block_size)
    for index, value in given.items():
        x[index] = value
    out, back = torch.empty_like(expected), torch.empty_like(x)
    encode_into(out, [x], None, bits=bits, block_size=block_size)
    assert torch.equal(out, expected)
    decode_into([back], [expected], bits=bits, block_size=block_size)
    assert set(back.nonzero().view(-1).tolist()) <= given.keys()
    scale = scales(expected, bits, block_size).item()
    magnitudes = {0.5: [7, -2, 1], 0.25: [-3, 1], 0.125: [1, -1]}[bits]
    assert [back[index] for index in list(given)[: len(magnitudes)]] == [k * scale for k in magnitudes]


@each_level
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_largest_of_each_group_travels_and_all_else_waits(bits, data):
    block_size, seed = data.draw(st.sampled_from([64, 128, B, 4096])), data.draw(SEEDS)
    x = gauss(2 * block_size, seed) * 2.0 ** data.draw(st.integers(-60, 60))
    if data.draw(st.booleans()):  # many ties
        x = x.sign() * (x.abs() / x.abs().max() * 3).round()
    residual, word = residual_of(len(x)), data.draw(SEEDS)
    got = decoded(encode(x, residual, bits=bits, block_size=block_size, dither=word), bits, block_size)
    assert torch.equal(residual, stored((x - got).view(2, -1), word).view(-1))
    assert (residual.abs() <= x.abs() * (1 + 2**-7)).all(), "no more is sent than there is"
    assert got.any() or not x.any()
    for group, sent in zip(
        groups(x, bits, block_size).transpose(1, 2).flatten(0, 1),
        groups(got, bits, block_size).transpose(1, 2).flatten(0, 1),
        strict=True,
    ):
        first = (group.abs() == group.abs().max()).nonzero()[0].item()
        assert set(sent.nonzero().view(-1).tolist()) <= {first}


@each_level
@pytest.mark.parametrize("block_size", [64, B, 65536])
def test_groups_are_of_one_size_and_keep_neighbours_and_columns_apart(bits, block_size):
    """Values of a column of a matrix are alike, and so are neighbours: they had better not wait for each other."""
    of, n = group_of(bits, block_size), int(block_size * bits / 8)
    assert torch.equal(of.bincount(), torch.full((n,), round(8 / bits)))
    assert torch.equal(of.view(-1, n).sort(dim=1).values, torch.arange(n).expand(round(8 / bits), n))
    for columns in (8, 16, 32, 64):
        if block_size == B:
            rows = B // columns
            met = max(of.view(rows, columns)[:, column].bincount().max().item() for column in range(columns))
            assert met <= max(1, rows // n), f"{met} of {rows} values of a column in one group"


@pytest.mark.usefixtures("backend")
@each_level
def test_a_group_without_values_sends_nothing(bits):
    """Zeros in the midst of values, and padding: a zero byte."""
    x, count = gauss(2 * B), B + int(B * bits / 8) // 2
    x[:B][group_of(bits, B) % 2 == 1] = 0
    x[count:] = 7.0
    residual = residual_of(2 * B)
    payload = torch.empty(2 * block_bytes(bits, B), dtype=torch.uint8)
    encode_into(payload, [x[:count]], residual, bits=bits, block_size=B)
    codes = payload.view(2, -1)[:, 2:]
    assert not codes[0, 1::2].any() and not codes[1, codes.shape[1] // 2 :].any()
    assert codes[0, ::2].any() and codes[1].any() and not residual[count:].any()


@each_level
def test_a_scale_is_a_bfloat16_and_what_the_codes_are_made_from(bits):
    x, magnitudes = gauss(64 * B), sparse.MAGNITUDES[bits]
    payload = encode(x, None, bits=bits, block_size=B)
    largest = groups(x, bits, B).abs().amax(dim=1).double()
    exact = magnitudes.rms * largest.square().mean(dim=1).sqrt() + magnitudes.maximum * largest.amax(dim=1)
    found = scales(payload, bits, B)
    assert torch.equal(found, exact.float().bfloat16().float())
    assert (payload[:, 0].int() + 256 * payload[:, 1].int()).equal(found.view(torch.int32) >> 16)
    k = (largest / found.double().view(-1, 1)).round().clamp(max=magnitudes.most)
    got = groups(decoded(payload, bits), bits, B).abs().amax(dim=1).double()
    assert torch.equal(got, k * found.double().view(-1, 1))


@each_level
@pytest.mark.parametrize("every", [32, B])
def test_lone_values_arrive(bits, every):
    """A gradient that is non-zero in few places of a block, always the same: it waits for nobody."""
    x, residual, arrived = torch.zeros(4 * B), residual_of(4 * B), torch.zeros(4 * B)
    x[5::every] = gauss(len(x[5::every]))
    for step in range(60):
        arrived += decoded(encode(x, residual, bits=bits, block_size=B, dither=dither(step)), bits)
    assert not arrived[x == 0].any()
    assert ((arrived * x).sum() / (60 * x.square().sum())).item() > 0.9


def error(bits: float, steps: int) -> float:
    """Relative error of the sum of `steps` exchanges of two workers, with two quantizations."""
    residuals = [residual_of(16 * B) for _ in range(3)]
    delivered, exact = torch.zeros(16 * B, dtype=torch.float64), torch.zeros(16 * B, dtype=torch.float64)
    for step in range(steps):
        shape = {"bits": bits, "block_size": B, "dither": dither(step)}
        gradients = [gauss(16 * B, 1 + 2 * step + rank) for rank in range(2)]
        exact += sum(g.double() for g in gradients)
        versions = [encode(g, r, **shape) for g, r in zip(gradients, residuals, strict=False)]
        total = decode_sum(versions, bits=bits, block_size=B)
        delivered += decode(encode(total, residuals[2], **shape), bits=bits, block_size=B)
    return ((delivered - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("bits, limit", [(0.125, 0.48), (0.25, 0.34), (0.5, 0.24)])
def test_the_error_of_a_sum_falls_with_the_number_of_steps(bits, limit):
    assert error(bits, 100) < limit


@pytest.mark.parametrize("bits", LEVELS[:-1])
@pytest.mark.parametrize("shift", [0, 1])
def test_scales_of_a_payload_at_any_address(bits, shift):
    x = gauss(3 * B) * torch.tensor([1.0, 0.0, 1e3]).repeat_interleave(B)
    x[-1] = math.nan
    size = 3 * block_bytes(bits, B)
    payload = torch.zeros(size + 8, dtype=torch.uint8)[shift : shift + size]
    payload.copy_(encode(x, None, bits=bits, block_size=B).view(-1))
    found = scales(payload, bits, B)
    assert found.dtype == torch.float32 and found.shape == (3,)
    assert found[0] > 0 and found[1] == 0 and found[2].isnan()
    assert scales(payload[:0], bits, B).shape == (0,)
