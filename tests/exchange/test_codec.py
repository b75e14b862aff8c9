"""The wire format: golden bytes, and refusal of everything that is not what was expected."""

from pathlib import Path

import pytest
import torch
from coded import STEP, header, message, payloads
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS, LockstepError
from hvd_dyncomp.exchange.topology import shard_bounds
from hvd_dyncomp.kernels.reference import encode

GOLDEN = Path(__file__).parent / "fixtures" / "wire_v13.txt"
COMPRESSED = [bits for bits in LEVELS if bits < 32]
PAYLOAD = torch.arange(108, dtype=torch.uint8)
SIZES = [108, 108]
TWO = torch.cat([message(PAYLOAD), message(PAYLOAD)])


def golden_lines() -> list[str]:
    """A header, and per level a block of values that make every code appear and one half of padding, as hexadecimal."""
    x = (torch.arange(64) - 31.5) / 8
    lines = ["header " + header(7).hex()]
    for bits in COMPRESSED:
        for real in (64, 32):
            payload = encode(x, None, bits=bits, block_size=64, real=real)
            lines.append(f"{bits} {real} " + payload.numpy().tobytes().hex())
    x[31] = 0.0
    lines.append("2 three codes " + encode(x, None, bits=2, block_size=64).numpy().tobytes().hex())
    return lines


def test_the_format_has_not_changed():
    """Who changes the bytes changes WIRE_VERSION, docs/wire_format.md and this fixture."""
    assert GOLDEN.read_text().splitlines() == golden_lines()


def test_messages_are_cut_as_they_were_sent():
    sent = [PAYLOAD, PAYLOAD[:0], PAYLOAD[:36]]
    found = payloads(torch.cat([message(payload) for payload in sent]), [108, 0, 36])
    assert all(torch.equal(one, other) for one, other in zip(found, sent, strict=True))


@pytest.mark.parametrize("step", [0, STEP + 1, STEP + 2**32])
def test_a_header_that_differs_is_the_reason(step):
    """Of the first rank whose header does."""
    odd = message(PAYLOAD, step)
    with pytest.raises(LockstepError, match=f"bucket here: rank 1 has step {step}, this rank has {STEP}"):
        payloads(torch.cat([message(PAYLOAD), odd, odd]), [*SIZES, 108])


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_an_error_or_exactly_what_was_expected(data):
    received = data.draw(st.binary(max_size=400))
    tensor = torch.frombuffer(bytearray(received), dtype=torch.uint8) if received else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(LockstepError):
        payloads(tensor, SIZES)


@pytest.mark.parametrize("received", [TWO[:0], TWO[:100], TWO[:231], torch.cat([TWO, TWO[:1]])], ids=len)
def test_another_length_is_an_error(received):
    with pytest.raises(LockstepError, match=f"bucket here: {len(received)} bytes arrived, expected 232"):
        payloads(received, SIZES)


@given(blocks=st.integers(0, 10_000), world_size=st.integers(1, 300))
def test_shards_cover_everything_evenly(blocks, world_size):
    bounds = shard_bounds(blocks, world_size)
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert len(sizes) == world_size and bounds[0] == 0 and bounds[-1] == blocks
    assert max(sizes) - min(sizes) <= 1
