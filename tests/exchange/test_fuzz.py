"""Any bytes from another rank: an error or numbers, never a crash. (Reads out of bounds: tests/test_sanitizers.py.)"""

import contextlib

import pytest
import torch
from coded import HEADER_BYTES, header, message, message_bytes, payloads
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS, LockstepError
from hvd_dyncomp.exchange.wire import HEADER
from hvd_dyncomp.kernels import block_bytes, decode_into, reduce_into, reference

pytestmark = pytest.mark.promise("Any bytes from another rank give numbers or an error, never a crash.")

SETTINGS = settings(max_examples=300, deadline=None)
LEVEL = st.sampled_from([bits for bits in LEVELS if bits < 32])
BLOCK_SIZE = 64


def as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def decode(payloads: list[torch.Tensor], bits: int) -> torch.Tensor:
    out = torch.zeros(payloads[0].numel() // block_bytes(bits, BLOCK_SIZE) * BLOCK_SIZE)
    decode_into([out], payloads, bits=bits, block_size=BLOCK_SIZE)
    return out


@SETTINGS
@given(data=st.binary(max_size=700), bits=LEVEL, blocks=st.integers(0, 4), ranks=st.integers(1, 3))
def test_arbitrary_bytes_are_refused(data, bits, blocks, ranks):
    with pytest.raises(LockstepError):
        payloads(as_tensor(data), [blocks * block_bytes(bits, BLOCK_SIZE)] * ranks)


@SETTINGS
@given(data=st.data(), bits=LEVEL, blocks=st.integers(1, 4), ranks=st.integers(1, 3))
def test_arbitrary_payloads_are_numbers(data, bits, blocks, ranks):
    """What the header cannot tell from a message: any float for a scale, any code."""
    size = blocks * block_bytes(bits, BLOCK_SIZE)
    sent = [as_tensor(data.draw(st.binary(min_size=size, max_size=size))) for _ in range(ranks)]
    found = payloads(torch.cat([message(payload) for payload in sent]), [size] * ranks)
    got = decode(found, bits)
    wanted = reference.decode_sum([payload.view(blocks, -1) for payload in sent], bits=bits, block_size=BLOCK_SIZE)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert torch.equal(got[~got.isnan()], wanted[~wanted.isnan()])
    out, residual = torch.zeros(size, dtype=torch.uint8), torch.zeros(blocks * BLOCK_SIZE).bfloat16()
    reduce_into(out, found, residual, bits=bits, block_size=BLOCK_SIZE)
    assert residual.isfinite().all()


@SETTINGS
@given(data=st.data(), bits=LEVEL, blocks=st.integers(1, 4))
def test_a_damaged_message_is_refused_or_decoded(data, bits, blocks):
    """Cut, lengthened, or with a byte changed: what the step's number can see is an error, the rest other numbers."""
    size = message_bytes(blocks, bits, BLOCK_SIZE)
    whole = bytearray(size)
    whole[:HEADER_BYTES] = header()
    kind = data.draw(st.sampled_from(["cut", "longer", "changed"]))
    if kind == "cut":
        whole = whole[: data.draw(st.integers(0, size - 1))]
    elif kind == "longer":
        whole += data.draw(st.binary(min_size=1, max_size=80))
    else:
        position = data.draw(st.integers(0, size - 1))
        whole[position] ^= data.draw(st.integers(1, 255))
    refused = kind != "changed" or position < HEADER.size
    with pytest.raises(LockstepError) if refused else contextlib.nullcontext():
        [payload] = payloads(as_tensor(bytes(whole)), [size - HEADER_BYTES])
        assert decode([payload], bits).numel() == blocks * BLOCK_SIZE


@pytest.mark.soak
def test_a_gigabyte_of_arbitrary_payloads():
    """The same in bulk: messages of 1 MiB, whose first blocks the reference decodes as well."""
    generator = torch.Generator().manual_seed(0)
    levels = [bits for bits in LEVELS if bits < 32]
    fed = 0
    while fed < 2**30:
        bits = levels[fed // 2**20 % len(levels)]
        blocks = 2**20 // block_bytes(bits, BLOCK_SIZE)
        payload = torch.randint(256, (blocks * block_bytes(bits, BLOCK_SIZE),), dtype=torch.uint8, generator=generator)
        found = payloads(message(payload), [payload.numel()])
        got = decode(found, bits)[: 16 * BLOCK_SIZE]
        first = payload.view(blocks, -1)[:16]
        wanted = reference.decode_sum([first], bits=bits, block_size=BLOCK_SIZE)
        torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)
        out, residual = torch.zeros_like(payload), torch.zeros(blocks * BLOCK_SIZE).bfloat16()
        reduce_into(out, found, residual, bits=bits, block_size=BLOCK_SIZE)
        assert residual.isfinite().all()
        fed += 2**20
    print(f"{fed} bytes")
