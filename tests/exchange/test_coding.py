"""Levels of blocks: which blocks are whose, which level a block has, and that each level's are coded by themselves."""

import pytest
import torch
from simulated import noise

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.coding import SMALL_BITS, Coding, Span
from hvd_dyncomp.exchange.slots import Slot, divided, tail
from hvd_dyncomp.kernels import dither_from


def slots(*sizes: int, min_numel: int = 100) -> list[Slot]:
    """Of one bucket, large ones first."""
    parameters = [(f"p{number}", torch.zeros(size)) for number, size in enumerate(sizes)]
    [(_, found)] = divided(parameters[::-1], min_numel, 2**30, None)
    return found


def test_blocks_with_values_of_small_tensors_have_eight_bits_at_least():
    of = slots(200, 100, 2, 90)  # small ones from value 300 on, which is in block 4 of 64 values
    for bits in (0.125, 4, 7):
        assert tail(of, bits, 64) == 4
    for bits in (8, 16):
        assert tail(of, bits, 64) == 7
    assert tail(of, 4, 512) == 0
    assert tail(slots(200, 120), 0.25, 64) == 5
    assert tail(slots(5, 70), 0.25, 64) == 0


@pytest.mark.parametrize("tail", [0, 3, 7])
@pytest.mark.parametrize("span", [Span(0, 7), Span(1, 4), Span(3, 0), Span(2, 1), Span(4, 2)])
@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize("bits", [4, 0.25])
def test_each_level_of_a_span_is_coded_by_itself(bits, size, span, tail):
    """In blocks of the bucket or, from one bit on, in parts of them that share a scale."""
    coding, values = Coding(bits, tail, size), noise("x", 7 * size, 0, 0)
    payload = torch.zeros(coding.nbytes(span), dtype=torch.uint8)
    residual = torch.zeros(size * span.blocks, dtype=torch.bfloat16)
    coding.encode(payload, span, [values], residual, dither=5)
    out = torch.zeros(7 * size)
    coding.decode([out], span, [payload, payload], 0.5)
    first, last = size * span.first, size * (span.first + span.blocks)
    assert not out[:first].any() and not out[last:].any()
    if bits == 4:
        torch.testing.assert_close(out[first:last] + residual, values[first:last], rtol=0, atol=0.03)
    apart, left = [torch.zeros(0, dtype=torch.uint8)], [residual[:0]]
    for block in range(span.first, span.first + span.blocks):
        level = bits if block < tail else SMALL_BITS
        of_scale = size if level < 1 else min(size, 128)
        for start in range(size * block, size * (block + 1), of_scale):
            apart.append(torch.zeros(kernels.block_bytes(level, of_scale), dtype=torch.uint8))
            left.append(torch.zeros(of_scale, dtype=torch.bfloat16))
            form = {"bits": level, "block_size": of_scale, "dither": dither_from(5, start // of_scale)}
            kernels.encode_into(apart[-1], [values], left[-1], first=start, **form)
    assert torch.equal(payload, torch.cat(apart))
    assert torch.equal(residual, torch.cat(left)), "rounded as the bucket's blocks are"


@pytest.mark.parametrize("bits", [4, 0.25])
def test_blocks_that_are_not_finite_are_nan_at_both_levels(bits):
    span, coding = Span(1, 6), Coding(bits, 3, 64)
    versions = []
    for spoiled in ((1, 2), (2, 6)):
        values = noise("x", 7 * 64, 0, 0)
        for block in spoiled:
            values[64 * block + 5] = float("nan")
        payload = torch.zeros(coding.nbytes(span), dtype=torch.uint8)
        coding.encode(payload, span, [values], None, dither=0)
        versions.append(payload)
    out = torch.zeros(7 * 64)
    coding.decode([out], span, versions, 1.0)
    assert torch.equal(out.view(7, 64).isnan().all(dim=1), torch.tensor([False, True, True, False, False, False, True]))
