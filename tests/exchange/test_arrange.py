"""A bucket is divided anew when it is known where the ranks are: what was owed still arrives, once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.topology import Topology

SIZES = {"a": 700, "b": 130}
VALUES = 830
# Of twelve ranks: all at once, two hosts, two dealt out, three and six hosts.
ARRANGEMENTS = ["flat", [r // 6 for r in range(12)], [r % 2 for r in range(12)], [r // 4 for r in range(12)]]
ARRANGEMENTS += [[r // 2 for r in range(12)]]


def new_bucket(rank: int = 5, size: int = 12, **changes) -> Bucket:
    common = {"block_size": 64, "rank": rank, "world_size": size, "error_feedback": True, **changes}
    parameters = [(name, torch.zeros(numel)) for name, numel in SIZES.items()]
    [bucket] = make_buckets(parameters, min_numel=1, bucket_bytes=10**6, **common)[0]
    return bucket


def arrange(bucket: Bucket, names) -> None:
    where = Topology.one_rank_per_host(12) if names == "flat" else Topology.of(names)
    bucket.arrange(where, by_host=names != "flat")


def owe(bucket: Bucket, generator: torch.Generator) -> None:
    """As after a quantization: another residual wherever this rank quantizes, and none in the padding."""
    own, shard = bucket.residuals.own, bucket.residuals.shard
    own.copy_(torch.randn(own.shape, generator=generator))
    own[max(0, bucket.values - bucket.residuals.own_range.start) :] = 0
    if bucket.section.sharded:
        shard.copy_(torch.randn(shard.shape, generator=generator))
        shard[max(0, bucket.values - bucket.residuals.shard_range.start) :] = 0
    bucket.residuals.quantized()


def all_owed(bucket: Bucket) -> torch.Tensor:
    """By value, both residuals and what waits outside the section."""
    total = bucket.residuals.undelivered().float()
    if bucket.section.sharded:
        total[bucket.residuals.shard_range] += bucket.residuals.shard
    return total


def ones(bucket: Bucket) -> list[torch.Tensor]:
    """Gradients of all slots against which no residual is too large."""
    return [torch.full((slot.numel,), 1e4) for slot in bucket.slots]


@settings(deadline=None)
@given(rank=st.integers(0, 11), turns=st.lists(st.sampled_from(ARRANGEMENTS), max_size=6), seed=st.integers(0, 999))
def test_whatever_arrangements_follow_nothing_of_what_is_owed_is_lost(rank, turns, seed):
    bucket, generator = new_bucket(rank), torch.Generator().manual_seed(seed)
    owe(bucket, generator)
    for names in turns:
        before = all_owed(bucket)
        arrange(bucket, names)
        owed = all_owed(bucket)
        assert torch.allclose(owed, before, rtol=2**-8, atol=2**-6) and bucket.residuals.carries
        assert not all_owed(bucket)[VALUES:].any(), "the padding owes something"
        assert bucket.residuals.own.numel() == bucket.section.blocks * 64
        if seed % 2:  # a step in between, whose zero gradients take nothing along
            bucket.residuals.add_all_pending(bucket.slots, [torch.zeros(slot.numel) for slot in bucket.slots])
            assert torch.equal(all_owed(bucket), owed)


@pytest.mark.parametrize("names", ARRANGEMENTS[1:], ids=["2x6", "2x6 dealt", "3x4", "6x2"])
def test_what_is_owed_outside_the_section_joins_the_next_gradients_once(names):
    bucket, generator = new_bucket(), torch.Generator().manual_seed(1)
    owe(bucket, generator)
    arrange(bucket, names)
    everything, own = all_owed(bucket), bucket.residuals.own.clone()
    section = torch.zeros(len(everything), dtype=torch.float32)
    section[bucket.residuals.own_range] = own
    outside = everything - section
    assert own.any() and outside.any() and not outside[bucket.residuals.own_range].any()
    given, gradients = bucket.residuals.add_all_pending(bucket.slots, ones(bucket)), ones(bucket)
    for slot, total, gradient in zip(bucket.slots, given, gradients, strict=True):
        torch.testing.assert_close(total - gradient, outside[slot.range], rtol=0, atol=2e-3)
    assert torch.equal(bucket.residuals.own, own), "the kernel adds it, and must find it"
    assert torch.allclose(all_owed(bucket), section)
    again = bucket.residuals.add_all_pending(bucket.slots, gradients)
    assert all(total is gradient for total, gradient in zip(again, gradients, strict=True)), "delivered twice"


def test_a_flat_arrangement_knows_the_neighbours():
    bucket, apart = new_bucket(), new_bucket()
    bucket.arrange(Topology.of(ARRANGEMENTS[1]), by_host=False)
    assert bucket.arrangement.sections == apart.arrangement.sections
    assert bucket.arrangement.host_ranks == tuple(range(6)) and apart.arrangement.host_ranks == (5,)


def test_without_error_feedback_there_is_nothing_to_move():
    bucket = new_bucket(error_feedback=False)
    arrange(bucket, ARRANGEMENTS[1])
    gradients = ones(bucket)
    assert not bucket.residuals.enabled and bucket.residuals.add_all_pending(bucket.slots, gradients) is gradients


def test_what_is_dropped_is_dropped_outside_the_section_too():
    bucket = new_bucket()
    owe(bucket, torch.Generator().manual_seed(1))
    arrange(bucket, ARRANGEMENTS[1])
    bucket.residuals.drop()
    assert not all_owed(bucket).any() and not bucket.residuals.carries
