"""Runs of tensors without padding: where they end, which level their blocks have, and that each is coded by itself."""

import pytest
import torch
from simulated import noise

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.coding import SMALL_BITS, Coding, Run, Span, Values
from hvd_dyncomp.exchange.slots import Slot, divided, runs_of
from hvd_dyncomp.kernels import dither_from


def slots(*sizes: int, min_numel: int = 100, block_size: int = 64) -> list[Slot]:
    """Of one bucket, large ones first."""
    parameters = [(f"p{number}", torch.zeros(size)) for number, size in enumerate(sizes)]
    [(_, found)] = divided(parameters[::-1], min_numel, 2**30, block_size, None)
    return found


def test_a_run_ends_where_padding_is_and_before_small_tensors():
    of = slots(1025, 1152, 1100, 200, 100, 2, 90)
    assert [slot.start for slot in of] == [0, 1088, 2240, 3392, 3592, 3712, 3714]
    assert runs_of(of, 64) == [Run(0, 1025, False), Run(17, 3340, False), Run(53, 3692, False), Run(58, 3804, True)]
    assert runs_of(slots(1024, 2048), 64) == [Run(0, 3072, False)], "they fill their blocks"
    assert runs_of(slots(1024, 5, 64), 64) == [Run(0, 1024, False), Run(16, 1093, True)]


def test_blocks_of_small_tensors_have_eight_bits_at_least():
    runs = [Run(0, 200, False), Run(4, 290, True)]
    for bits in (0.125, 4, 7, 8, 16):
        coding = Coding(bits, runs, 64)
        assert coding.nbytes(Span(3, 1)) == kernels.block_bytes(bits, 64)
        assert coding.nbytes(Span(4, 1)) == kernels.block_bytes(max(bits, 8), 64)
        assert coding.nbytes(Span(0, 5)) == 4 * coding.nbytes(Span(3, 1)) + coding.nbytes(Span(4, 1))


RUNS = {
    "one": [Run(0, 7, False)],
    "small": [Run(0, 7, True)],
    "both": [Run(0, 3, False), Run(3, 7, True)],
    "padded": [Run(0, 2, False), Run(2, 3, False), Run(3, 7, True)],
}


@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("span", [Span(0, 7), Span(1, 4), Span(3, 0), Span(2, 1), Span(4, 2)])
@pytest.mark.parametrize("size", [64, 512])
@pytest.mark.parametrize("bits", [4, 0.25])
def test_each_run_of_a_span_is_coded_by_itself(bits, size, span, runs):
    """In blocks of the bucket or, from one bit on, in parts of them that share a scale. What is padding counts nowhere.

    "padded": of its last block, a run has all values but three.
    """
    missing = 3 * (runs == "padded")
    of = [Run(first, size * end - missing, small) for first, end, small in RUNS[runs]]
    coding, values = Coding(bits, of, size), noise("x", 7 * size, 0, 0)
    places = [slice(size * run.first, run.end) for run in of]
    given = Values([place.start for place in places], [values[place] for place in places])
    real = torch.zeros(7 * size, dtype=torch.bool)
    for place in places:
        real[place] = True
    payload = torch.zeros(coding.nbytes(span), dtype=torch.uint8)
    residual = torch.zeros(size * span.blocks, dtype=torch.bfloat16)
    coding.encode(payload, span, given, residual, dither=5)
    out = torch.zeros(7 * size)
    coding.decode(Values(given.starts, [out[place] for place in places]), span, [payload, payload], 0.5)
    first, last = size * span.first, size * (span.first + span.blocks)
    assert not out[:first].any() and not out[last:].any() and not out[~real].any()
    assert not residual[~real[first:last]].any()
    if bits == 4:
        torch.testing.assert_close(out[first:last] + residual, (values * real)[first:last], rtol=0, atol=0.03)
    apart, left = [torch.zeros(0, dtype=torch.uint8)], [residual[:0]]
    for block in range(span.first, span.first + span.blocks):
        [run] = [run for run in of if size * run.first <= size * block < run.end]
        level = SMALL_BITS if run.small else bits
        of_scale = size if level < 1 else min(size, 128)
        for start in range(size * block, size * (block + 1), of_scale):
            apart.append(torch.zeros(kernels.block_bytes(level, of_scale), dtype=torch.uint8))
            left.append(torch.zeros(of_scale, dtype=torch.bfloat16))
            form = {"bits": level, "block_size": of_scale, "dither": dither_from(5, start // of_scale)}
            kernels.encode_into(apart[-1], [values[: run.end]], left[-1], first=start, **form)
    assert torch.equal(payload, torch.cat(apart))
    assert torch.equal(residual, torch.cat(left)), "rounded as the bucket's blocks are"
    again, left_again = torch.zeros_like(payload), torch.zeros_like(residual)
    coding.reduce(again, span, [payload], left_again, dither=5)
    assert not left_again[~real[first:last]].any(), "what a sum has for padding is no value"


@pytest.mark.parametrize("bits", [4, 0.25])
def test_blocks_that_are_not_finite_are_nan_at_both_levels(bits):
    span, coding = Span(1, 6), Coding(bits, [Run(0, 192, False), Run(3, 448, True)], 64)
    versions = []
    for spoiled in ((1, 2), (2, 6)):
        values = noise("x", 7 * 64, 0, 0)
        for block in spoiled:
            values[64 * block + 5] = float("nan")
        payload = torch.zeros(coding.nbytes(span), dtype=torch.uint8)
        coding.encode(payload, span, Values([0], [values]), None, dither=0)
        versions.append(payload)
    out = torch.zeros(7 * 64)
    coding.decode(Values([0], [out]), span, versions, 1.0)
    assert torch.equal(out.view(7, 64).isnan().all(dim=1), torch.tensor([False, True, True, False, False, False, True]))
