"""The operations by the reference, which serve where there are no native ones: values in pieces, from anywhere on."""

import pytest
import torch
from equality import residual_of

from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, native, portable, reduce_into, reference
from hvd_dyncomp.kernels.scales import tree_sum

PIECES = [0, 100, 1, 300, 0, 47]
BACKENDS = [portable, native] if native else [portable]


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    monkeypatch.setattr("hvd_dyncomp.kernels.backends", {"cpu": request.param})


def pieces() -> list[torch.Tensor]:
    return list(torch.randn(sum(PIECES), generator=torch.Generator().manual_seed(1)).split(PIECES))


@pytest.mark.parametrize("bits", [0.125, 0.5, 1, 4, 16])
@pytest.mark.parametrize("first", [0, 64, 384])
def test_a_message_holds_the_values_from_first_on(bits, first):
    size = block_bytes(bits, 64)
    out, residual = torch.zeros(2 * size, dtype=torch.uint8), residual_of(128)
    encode_into(out, pieces(), residual, bits=bits, block_size=64, first=first, dither=7)
    part = torch.cat([*pieces(), torch.zeros(128)])[first : first + 128]
    real = max(0, sum(PIECES) - first)
    owed = residual_of(128)
    expected = reference.encode(part, owed, bits=bits, block_size=64, real=real, dither=7)
    assert torch.equal(out, expected.view(-1)) and not residual[real:].any() and torch.equal(residual, owed)


@pytest.mark.parametrize("bits", [0.25, 8])
@pytest.mark.parametrize("first", [0, 64, 384])
def test_what_is_decoded_goes_where_it_came_from(bits, first):
    message = reference.encode(torch.randn(128), None, bits=bits, block_size=64)
    into = [torch.full_like(piece, 7.0) for piece in pieces()]
    decode_into(into, [message.view(-1)] * 2, bits=bits, block_size=64, first=first, factor=0.25)
    expected = torch.full((sum(PIECES) + 128,), 7.0)
    expected[first : first + 128] = reference.decode_sum([message] * 2, bits=bits, block_size=64, factor=0.25)
    assert torch.equal(torch.cat(into), expected[: sum(PIECES)])


def test_padding_does_not_count_in_a_reduced_shard():
    version = reference.encode(torch.ones(64), None, bits=1, block_size=64, real=10).view(-1)
    out, residual = torch.zeros_like(version), residual_of(64)
    reduce_into(out, [version] * 2, residual, bits=1, block_size=64, real=10)
    assert torch.equal(reference.decode(out.view(1, -1), bits=1, block_size=64)[:10], torch.full((10,), 2.0))
    assert not residual[10:].any()


def test_sums_run_over_a_tree_of_halves():
    """An addition in another order gives other bits: here, other numbers."""
    rows = torch.tensor([[1e16, 1.0, -1e16, 1.0], [1e16, -1e16, 1.0, 1.0]], dtype=torch.float64)
    assert tree_sum(rows).tolist() == [[2.0], [1e16 + 1.0 + (-1e16 + 1.0)]]
