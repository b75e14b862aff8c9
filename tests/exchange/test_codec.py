"""The wire format: golden bytes, and refusal of everything that is not what was expected."""

from pathlib import Path

import pytest
import torch
from coded import message_bytes, split_messages
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import LEVELS, LockstepError
from hvd_dyncomp.exchange.messages import header_tensor, noise_for
from hvd_dyncomp.exchange.topology import shard_bounds
from hvd_dyncomp.exchange.wire import HEADER_BYTES, WIRE_VERSION, Header, Phase
from hvd_dyncomp.kernels.reference import encode

GOLDEN = Path(__file__).parent / "fixtures" / "wire_v6.txt"
COMPRESSED = [bits for bits in LEVELS if bits < 32]
HEADER = Header(WIRE_VERSION, Phase.SCATTER, 4, 0, 0xDEADBEEF, 7, 3)


def message(header: Header = HEADER, block_size: int = 64) -> torch.Tensor:
    body = torch.arange(message_bytes(header.blocks, header.bits, block_size) - HEADER_BYTES) % 251
    return torch.cat([header_tensor(header, torch.device("cpu")), body.to(torch.uint8)])


def golden_lines() -> list[str]:
    """A header, and per level a block of values that make every code appear and one half of padding, as hexadecimal."""
    x = (torch.arange(64) - 31.5) / 8
    lines = ["header " + HEADER.to_bytes().hex()]
    for bits in COMPRESSED:
        for real in (64, 32):
            payload = encode(x, None, bits=bits, block_size=64, real=real)
            lines.append(f"{bits} {real} " + payload.numpy().tobytes().hex())
    return lines


def test_the_format_has_not_changed():
    """Who changes the bytes changes WIRE_VERSION, docs/wire_format.md and this fixture."""
    assert GOLDEN.read_text().splitlines() == golden_lines()


def test_messages_are_cut_as_they_were_sent():
    headers = [HEADER._replace(blocks=blocks) for blocks in (3, 0, 1)]
    sent = [message(header) for header in headers]
    bodies = split_messages(torch.cat(sent), headers, 64, "here")
    assert [body.shape for body in bodies] == [(108,), (0,), (36,)]
    for body, whole in zip(bodies, sent, strict=True):
        assert torch.equal(body, whole[HEADER_BYTES:])


@pytest.mark.parametrize("field", Header._fields)
def test_every_field_of_the_header_is_checked(field):
    other = HEADER._replace(**{field: getattr(HEADER, field) + 1})
    received = torch.cat([message(), message(other)])
    with pytest.raises(LockstepError, match=f"here: rank 1 has {field} {getattr(other, field)}, this rank has"):
        split_messages(received, [HEADER, HEADER], 64, "here")


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_arbitrary_bytes_are_an_error_or_exactly_what_was_expected(data):
    received = data.draw(st.binary(max_size=400))
    tensor = torch.frombuffer(bytearray(received), dtype=torch.uint8) if received else torch.empty(0, dtype=torch.uint8)
    with pytest.raises(LockstepError):
        split_messages(tensor, [HEADER, HEADER], 64, "here")


@given(cut=st.integers(0, 247))
def test_truncated_messages_are_an_error(cut):
    whole = torch.cat([message(), message()])
    assert whole.numel() == 248
    rank, sent = divmod(cut, 124)
    least = "less than a header" if sent < HEADER_BYTES else "expected 124"
    with pytest.raises(LockstepError, match=f"here: rank {rank} sent {sent} bytes, .*{least}"):
        split_messages(whole[:cut], [HEADER, HEADER], 64, "here")


def test_a_message_too_long_is_an_error():
    with pytest.raises(LockstepError, match="249 bytes arrived, expected 248"):
        split_messages(torch.cat([message(), message(), torch.zeros(1, dtype=torch.uint8)]), [HEADER] * 2, 64, "here")


@given(blocks=st.integers(0, 10_000), world_size=st.integers(1, 300))
def test_shards_cover_everything_evenly(blocks, world_size):
    bounds = shard_bounds(blocks, world_size)
    sizes = [b - a for a, b in zip(bounds, bounds[1:], strict=False)]
    assert len(sizes) == world_size and bounds[0] == 0 and bounds[-1] == blocks
    assert max(sizes) - min(sizes) <= 1


def test_randomness_differs_in_everything_and_touches_no_global_state():
    before = torch.get_rng_state()
    keys = {
        noise_for(rank, step, message).key
        for rank in range(3)
        for step in range(3)
        for message in ("a/SCATTER", "a/GATHER", "b/SCATTER")
    }
    assert len(keys) == 27
    assert noise_for(2, 3, "a") == noise_for(2, 3, "a")
    assert torch.equal(before, torch.get_rng_state())
