"""What error feedback owes survives saving and loading on the same ranks; on others it begins at zero."""

import pytest
import torch

from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.topology import Topology

SIZES = (700, 130, 2000)


def buckets_of(rank, size, **changes):
    parameters = [(f"p{i}", torch.zeros(numel)) for i, numel in enumerate(SIZES)]
    common = {"block_size": 64, "rank": rank, "topology": Topology.one_rank_per_host(size), "error_feedback": True}
    return make_buckets(parameters, **{**common, "min_numel": 10, "bucket_bytes": 4000, **changes})[0]


def indebted(rank, size, seed):
    """Buckets and state of a rank after a step."""
    generator = torch.Generator().manual_seed(seed)
    buckets = buckets_of(rank, size)
    for bucket in buckets:
        bucket.residuals.own.copy_(torch.randn(bucket.residuals.own.shape, generator=generator))
        bucket.residuals.shard.copy_(torch.randn(bucket.residuals.shard.shape, generator=generator))
        last = bucket.runs[-1].end
        bucket.residuals.own[last:] = 0  # the padding owes nothing, in either residual
        bucket.residuals.shard[max(0, last - bucket.residuals.shard_range.start) :] = 0
        bucket.residuals.quantized()
    return buckets


def state_of(buckets, rank, size, hosts=None):
    return {"rank": rank, "world_size": size, "hosts": hosts, **residual_state.export(buckets)}


def none_of(buckets):
    kinds = [residual for bucket in buckets for residual in (bucket.residuals.own, bucket.residuals.shard)]
    return not any(residual.any() for residual in kinds) and not any(bucket.residuals.carries for bucket in buckets)


@pytest.mark.parametrize("size", [2, 3])
def test_the_same_ranks_restore_every_bit(size):
    old, new = indebted(1, size, seed=1), buckets_of(1, size)
    old[0].residuals.carries = False
    residual_state.restore(new, residual_state.checked(state_of(old, 1, size)), 1, size, None)
    for theirs, mine in zip(old, new, strict=True):
        assert torch.equal(theirs.residuals.own, mine.residuals.own)
        assert torch.equal(theirs.residuals.shard, mine.residuals.shard)
        assert theirs.residuals.carries == mine.residuals.carries


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("speaks", [True, False])
def test_on_another_number_of_ranks_residuals_begin_at_zero(before, after, speaks, caplog):
    """With one warning, if there were any."""
    old, new = indebted(0, before, seed=1), buckets_of(0, after)
    for bucket in old:
        bucket.residuals.carries = speaks
    residual_state.restore(new, state_of(old, 0, before), 0, after, None)
    assert none_of(new) and caplog.text.count("residuals begin at zero") == speaks


def test_on_other_hosts_residuals_begin_at_zero(caplog):
    """Where buckets are divided by host; wherever ranks are, it is the same to those that are not."""
    new = buckets_of(0, 4)
    residual_state.restore(new, state_of(indebted(0, 4, seed=1), 0, 4, [[0, 1], [2, 3]]), 0, 4, [[0, 2], [1, 3]])
    assert none_of(new) and caplog.text.count("residuals begin at zero") == 1


@pytest.mark.parametrize("changes", [{"bucket_bytes": 10**6}, {"block_size": 128}])
def test_in_other_buckets_each_parameter_has_its_own_and_shards_begin_at_zero(changes):
    old, new = indebted(2, 3, seed=1), buckets_of(2, 3, **changes)
    saved = state_of(old, 2, 3)
    residual_state.restore(new, saved, 2, 3, None)
    again = state_of(new, 2, 3)
    assert all(torch.equal(again["residuals"][name], values) for name, values in saved["residuals"].items())
    kept = {bucket.name for bucket in new if bucket.residuals.shard.any()}
    assert all(again["shard_residuals"][name]["slots"] == saved["shard_residuals"][name]["slots"] for name in kept)
    assert len(kept) < len(old) and all(bucket.residuals.carries for bucket in new)


def test_nothing_is_changed_by_a_state_that_does_not_fit():
    state = state_of(indebted(0, 2, seed=1), 0, 2)
    del state["residuals"]["p1"]
    new = indebted(0, 2, seed=2)
    before = [bucket.residuals.own.clone() for bucket in new]
    with pytest.raises(ValueError, match="p1 has shape None in the state and \\(130,\\)"):
        residual_state.restore(new, state, 0, 2, None)
    assert all(torch.equal(a, bucket.residuals.own) for a, bucket in zip(before, new, strict=True))
