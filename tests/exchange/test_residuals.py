"""What error feedback owes survives saving, loading and a change of the number of workers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.topology import Topology

SIZES = (700, 130, 2000)
SIZE_CHANGES = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 4), (4, 3), (3, 3)]


def buckets_of(rank, size):
    parameters = [(f"p{i}", torch.zeros(numel)) for i, numel in enumerate(SIZES)]
    common = {"block_size": 64, "rank": rank, "topology": Topology.one_rank_per_host(size), "error_feedback": True}
    return make_buckets(parameters, min_numel=10, bucket_bytes=4000, **common)[0]


def owed(buckets, factor):
    """What a rank's residuals will add to the result, by bucket."""
    total = {}
    for bucket in buckets:
        both = bucket.residuals.own.double().clone()
        if bucket.section.sharded:
            both[bucket.residuals.shard_range] += bucket.residuals.shard
        total[bucket.name] = factor * both[: bucket.values]
    return total


def magnitude(buckets, factor):
    """As `owed`, of absolute values: of what is rounded, though the two may cancel out."""
    for bucket in buckets:
        bucket.residuals.own.abs_()
        bucket.residuals.shard.abs_()
    return owed(buckets, factor)


def indebted(rank, size, seed):
    """Buckets and state of a rank after a step."""
    generator = torch.Generator().manual_seed(seed)
    buckets = buckets_of(rank, size)
    for bucket in buckets:
        bucket.residuals.own.copy_(torch.randn(bucket.residuals.own.shape, generator=generator))
        bucket.residuals.shard.copy_(torch.randn(bucket.residuals.shard.shape, generator=generator))
        bucket.residuals.own[bucket.values :] = 0  # the padding owes nothing, in either residual
        if bucket.section.sharded:
            bucket.residuals.shard[max(0, bucket.values - bucket.residuals.shard_range.start) :] = 0
        bucket.residuals.quantized()
    return buckets


def state_of(buckets, factor, rank, size):
    return {"rank": rank, "world_size": size, "factor": factor, **residual_state.export(buckets)}


@pytest.mark.parametrize("averaged", [(True, True), (False, False), (True, False), (False, True)])
@pytest.mark.parametrize(("before", "after"), SIZE_CHANGES)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), data=st.data())
def test_a_change_of_size_changes_nothing_of_what_is_owed(before, after, averaged, seed, data):
    rank = data.draw(st.integers(0, before - 1))
    new_rank = rank if before == after else data.draw(st.integers(0, after - 1))
    # A sum may become a mean: the shards stay where they are, and what they owe counts for more or less.
    old_factor, new_factor = 1 / before if averaged[0] else 1.0, 1 / after if averaged[1] else 1.0
    old = indebted(rank, before, seed)
    state = state_of(old, old_factor, rank if before == after else None, before)
    new = buckets_of(new_rank, after)
    residual_state.restore(new, state, new_rank, after, new_factor)
    expected, found = owed(old, old_factor), owed(new, new_factor)
    most = magnitude(old, old_factor)
    for name, value in found.items():
        error = (value - expected[name]).abs()
        assert (error <= 2**-8 * most[name]).all()  # each rounded once more
    assert all(bucket.residuals.carries for bucket in new)
    assert not any(bucket.residuals.own[bucket.values :].any() for bucket in new), "the padding owes nothing"


def test_the_same_size_restores_every_bit():
    old = indebted(2, 3, seed=1)
    new = buckets_of(2, 3)
    residual_state.restore(new, state_of(old, 1 / 3, 2, 3), 2, 3, 1 / 3)
    for theirs, mine in zip(old, new, strict=True):
        assert torch.equal(theirs.residuals.own, mine.residuals.own)
        assert torch.equal(theirs.residuals.shard, mine.residuals.shard)


def test_a_state_of_float32_is_rounded():
    """As residuals were saved before they were bfloat16."""
    old, new = indebted(2, 3, seed=1), buckets_of(2, 3)
    state = state_of(old, 1 / 3, 2, 3)
    state["residuals"] = {name: 1.001 * values.float() for name, values in state["residuals"].items()}
    for shard in state["shard_residuals"].values():
        shard["values"] = 1.001 * shard["values"].float()
    residual_state.restore(new, residual_state.checked(state), 2, 3, 1 / 3)
    for theirs, mine in zip(old, new, strict=True):
        assert mine.residuals.own.dtype is mine.residuals.shard.dtype is torch.bfloat16
        assert torch.equal(theirs.residuals.own, mine.residuals.own), "to nearest: nothing is far from it"
        assert torch.equal(theirs.residuals.shard, mine.residuals.shard)


def test_nothing_is_changed_by_a_state_that_does_not_fit():
    state = state_of(indebted(0, 2, seed=1), 0.5, 0, 2)
    del state["residuals"]["p1"]
    new = indebted(0, 2, seed=2)
    before = [bucket.residuals.own.clone() for bucket in new]
    with pytest.raises(ValueError, match="p1 has shape None in the state and \\(130,\\)"):
        residual_state.restore(new, state, 0, 2, 0.5)
    assert all(torch.equal(a, bucket.residuals.own) for a, bucket in zip(before, new, strict=True))
