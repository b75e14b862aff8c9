"""What holds for any values in the kernels and for any messages on the wire.

What concerns one kernel, packing, and bytes from elsewhere is in test_kernels.py, test_native.py and test_fuzz.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS
from hvd_dyncomp.exchange.topology import shard_bounds
from hvd_dyncomp.exchange.wire import Greeting
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, scales
from hvd_dyncomp.kernels.reference import PLACEMENTS, SMALLEST_SCALE
from hvd_dyncomp.kernels.sparse import MAGNITUDES, group_size

pytestmark = pytest.mark.promise("Codec, policies and controller keep their invariants for any input.")

COMPRESSED = [bits for bits in LEVELS if bits < 32]
FORMATS = st.fixed_dictionaries({"bits": st.sampled_from(COMPRESSED), "block_size": st.sampled_from([64, 128, 256])})
WORDS = st.integers(0, 2**32 - 1)
ORDINARY = settings(max_examples=200, deadline=None)


@st.composite
def gradients(draw, extreme=1e30):
    """Tensors of any number and length, of every magnitude, with zeros: what a bucket is made of."""
    generator = torch.Generator().manual_seed(draw(WORDS))
    special = st.sampled_from([0.0, -0.0, 1e-45, -1e-38, 1.0, extreme, -extreme])
    tensors = []
    for length in draw(st.lists(st.integers(0, 200), min_size=1, max_size=4)):
        values = torch.randn(length, generator=generator) * 10.0 ** draw(st.integers(-20, 20))
        if length:
            values[draw(st.integers(0, length - 1)) :: draw(st.integers(1, 9))] = draw(special)
        tensors.append(values)
    return tensors


def padded(tensors, block_size):
    """The concatenation, followed by zeros up to a whole block."""
    flat = torch.cat(tensors)
    return torch.cat([flat, torch.zeros(-len(flat) % block_size)])


def encoded(tensors, blocks, residual=None, *, bits, block_size, **arguments):
    out = torch.zeros(blocks * block_bytes(bits, block_size), dtype=torch.uint8)
    encode_into(out, tensors, residual, bits=bits, block_size=block_size, **arguments)
    return out


def decoded(payload, blocks, *, bits, block_size):
    out = torch.full((blocks * block_size,), torch.nan)
    decode_into([out], [payload], bits=bits, block_size=block_size)
    return out


@ORDINARY
@given(tensors=gradients(), shape=FORMATS)
def test_nothing_is_lost_and_errors_are_bounded(tensors, shape):
    """What arrives and what is kept make up what was given; it is off by half of what codes are apart, or by what was
    clipped.
    """
    x = padded(tensors, shape["block_size"])
    blocks = len(x) // shape["block_size"]
    residual = torch.zeros(len(x), dtype=torch.bfloat16)
    payload = encoded(tensors, blocks, residual, **shape)
    assert payload.numel() == blocks * (2 + shape["block_size"] * shape["bits"] // 8)
    got = decoded(payload, blocks, **shape)
    if not blocks:
        return
    ulp = 2.0**-23 * torch.maximum(x.abs(), got.abs()).double() + 2.0**-133  # the smallest bfloat16
    real = sum(map(len, tensors))
    kept = residual.double()
    assert ((got.double() + kept - x.double()).abs() <= ulp + 2.0**-7 * kept.abs())[:real].all()
    assert not residual[real:].any(), "padding owes nothing"

    scale = scales(payload, **shape).double().view(-1, 1).abs()  # at 2 bits the sign says which codes a block has
    rows, errors = x.view(blocks, -1).double(), (got - x).view(blocks, -1).double().abs()
    if shape["bits"] >= 1:
        placement = PLACEMENTS[shape["bits"]]
        outermost = (0.5 if shape["bits"] == 1 else placement.top) * scale
        apart = scale
        if placement.outer:  # from the inner codes or from zero to the outer ones
            apart = torch.where(scales(payload, **shape).view(-1, 1) < 0, placement.outer, placement.outer - 1) * scale
        if placement.fine:  # up to this code they are one scale apart, up to twice as far out two, then four
            fine = placement.fine * scale
            apart = torch.where(rows.abs() <= fine, scale, torch.where(rows.abs() <= 2 * fine, 2 * scale, 4 * scale))
        allowed = torch.maximum(apart / 2, rows.abs() - outermost)
    else:  # of each group one value arrives, at most
        arrived = got.view(blocks, -1) != 0
        assert arrived.sum(dim=1).max() <= shape["block_size"] // group_size(shape["bits"])
        outermost = MAGNITUDES[shape["bits"]].most * scale
        allowed = torch.maximum(scale / 2, rows.abs() - outermost)
        allowed = torch.where(arrived, allowed, rows.abs())
    assert (errors <= allowed * (1 + 1e-5) + ulp.view(blocks, -1)).all()
    if shape["bits"] >= 8:
        half = placement.half
        finest = torch.clamp(rows.abs().amax(dim=1, keepdim=True) / (2 * half), min=half * SMALLEST_SCALE) * (1 + 2**-7)
        assert (errors <= finest * (1 + 1e-5) + ulp.view(blocks, -1)).all()
    zero = ~rows.any(dim=1)
    assert not got.view(blocks, -1)[zero].any() and not residual.view(blocks, -1)[zero].any()


@ORDINARY
@given(tensors=gradients(), shape=FORMATS, workers=st.integers(1, 5))
def test_shards_are_cut_from_the_whole(tensors, shape, workers):
    """However the values are divided among tensors and messages, the bytes are the same."""
    blocks = len(padded(tensors, shape["block_size"])) // shape["block_size"]
    bounds = shard_bounds(blocks, workers)
    pieces = [
        encoded(tensors, last - first, first=first * shape["block_size"], **shape)
        for first, last in zip(bounds, bounds[1:], strict=False)
    ]
    assert torch.equal(torch.cat(pieces), encoded([torch.cat(tensors)], blocks, **shape))


@ORDINARY
@given(tensors=gradients(), shape=FORMATS, data=st.data())
def test_blocks_that_are_not_finite_are_lost_and_no_others(tensors, shape, data):
    x = padded([*tensors, torch.ones(1)], shape["block_size"])
    blocks = len(x) // shape["block_size"]
    where = data.draw(st.lists(st.integers(0, len(x) - 1), max_size=4))
    x[where] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    residual = torch.randn(len(x), generator=torch.Generator().manual_seed(len(where))).bfloat16()
    before = residual.clone().view(blocks, -1)
    payload = encoded([x], blocks, residual, **shape)
    lost = {position // shape["block_size"] for position in where}
    rows = decoded(payload, blocks, **shape).view(blocks, -1)
    for block in range(blocks):
        assert rows[block].isnan().all() if block in lost else rows[block].isfinite().all()
        assert block not in lost or torch.equal(residual.view(blocks, -1)[block], before[block])
    assert residual.isfinite().all()


BYTE, LEVEL = st.integers(0, 255), st.sampled_from([0, *LEVELS])
GREETINGS = st.builds(Greeting, BYTE, BYTE, LEVEL, *[WORDS] * 3)


@ORDINARY
@given(sent=GREETINGS)
def test_greetings_survive_their_bytes(sent):
    assert len(sent.to_bytes()) == 16
    assert Greeting.from_bytes(sent.to_bytes()) == sent


@ORDINARY
@given(data=st.binary(min_size=16, max_size=16))
def test_other_bytes_are_another_greeting(data):
    """Nothing that a level cannot be passes for one."""
    greeting = Greeting.from_bytes(data)
    assert greeting.bits not in {0, *LEVELS} or greeting.to_bytes() == data
