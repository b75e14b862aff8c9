"""Which parameter travels where."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import Averager
from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.settings import Settings
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.simulate import World

COMMON = {"block_size": 64, "rank": 0, "topology": Topology.one_rank_per_host(2), "error_feedback": True}


def plan(sizes, *, min_numel=10, bucket_bytes=4000, **changes):
    parameters = [(f"p{i}", torch.zeros(size)) for i, size in enumerate(sizes)]
    return make_buckets(parameters, min_numel=min_numel, bucket_bytes=bucket_bytes, **{**COMMON, **changes})


@settings(deadline=None)
@given(st.lists(st.integers(0, 3000), max_size=30))
def test_every_parameter_has_a_place_of_its_own_and_small_ones_are_last(sizes):
    buckets, slots = plan(sizes)
    assert {name: slot.numel for name, slot in slots.items()} == {f"p{i}": size for i, size in enumerate(sizes) if size}
    for index, bucket in enumerate(buckets):
        assert [slot.start for slot in bucket.slots] == [
            sum(slot.numel for slot in bucket.slots[:i]) for i in range(len(bucket.slots))
        ]
        assert all(slot.bucket == index for slot in bucket.slots)
        assert [slot.index for slot in bucket.slots] == list(range(len(bucket.slots)))
        assert bucket.values * 4 <= 4000 or len(bucket.slots) == 1
        assert 0 <= bucket.blocks * 64 - bucket.values < 64
        assert [slot.small for slot in bucket.slots] == sorted(slot.small for slot in bucket.slots)
        for slot in bucket.slots:
            assert slot.small == (slot.numel < 10)
            first = next(other for other in bucket.slots if other.small or other is slot)
            assert slot.counted_as == (first.name if slot.small else slot.name)
    for small in (False, True):
        order = [slot.name for bucket in buckets for slot in bucket.slots if (slot.numel < 10) == small]
        assert order == [f"p{i}" for i in reversed(range(len(sizes))) if sizes[i] and (sizes[i] < 10) == small]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 150_000.0), (torch.float16, 65_504.0)])
def test_a_released_residual_is_bounded_by_the_gradient_and_stays_in_its_dtype(dtype, most):
    buckets, slots = plan([100])
    bucket = buckets[0]
    bucket.residuals.own[:100] = 1e8
    bucket.residuals.quantized()
    bucket.residuals.begin_flush()
    total = bucket.residuals.add_pending(slots["p0"], torch.full((100,), 50_000.0, dtype=dtype))
    torch.testing.assert_close(total, torch.full((100,), most, dtype=dtype))
    bucket.residuals.end_flush(added=True)
    assert not bucket.residuals.own.any() and not bucket.residuals.carries


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_is_no_gradient_takes_no_residual_along(value, dtype):
    """An unused parameter, or a step that a gradient scaler is about to skip, and has to know of."""
    buckets, slots = plan([100])
    bucket = buckets[0]
    bucket.residuals.own[:100] = 5
    bucket.residuals.quantized()
    bucket.residuals.begin_flush()
    gradient = torch.ones(100, dtype=dtype) * (value == value and value != 0.0)
    gradient[3] = value
    if value == 0.0:
        gradient.zero_()
    assert torch.equal(bucket.residuals.add_pending(slots["p0"], gradient).nan_to_num(7, 8), gradient.nan_to_num(7, 8))
    bucket.residuals.end_flush(added=True)
    assert bucket.residuals.carries and (bucket.residuals.own[:100] == 5).all(), "it waits"
    bucket.residuals.begin_flush()
    assert (bucket.residuals.add_pending(slots["p0"], torch.ones(100)) > 1).all()
    bucket.residuals.end_flush(added=True)
    assert not bucket.residuals.carries


def test_buckets_grow_with_the_number_of_ranks_unless_their_size_is_given():
    """Of a bucket a rank gets its share: no message becomes smaller with more ranks, up to a limit."""
    mib = 2**20
    for ranks, size in ((1, 8), (8, 8), (9, 9), (64, 64), (128, 128), (1024, 128)):
        assert Settings().bucket_bytes_among(ranks) == size * mib
        assert Settings(bucket_bytes=5).bucket_bytes_among(ranks) == 5

    def program(transport):
        tensors = [(f"p{i}", torch.zeros(2 * mib // 4)) for i in range(10)]
        averager = Averager(tensors, 4, transport=transport)
        averager.mean_([torch.zeros_like(tensor) for _, tensor in tensors])
        return len(averager._plan.buckets)

    assert World(2).run(program) == [3] * 2  # of 8 MiB
    assert World(16).run(program) == [2] * 16  # of 16
