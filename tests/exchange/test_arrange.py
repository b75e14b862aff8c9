"""A bucket is divided anew when it is known where the ranks are: if that changes anything, residuals begin at zero."""

import pytest
import torch

from hvd_dyncomp.exchange.buckets import Bucket, make_buckets
from hvd_dyncomp.exchange.topology import Topology

SIZES = {"a": 700, "b": 130}
# Of twelve ranks: two hosts, two dealt out, three and six hosts.
BY_HOST = [[r // 6 for r in range(12)], [r % 2 for r in range(12)], [r // 4 for r in range(12)]]
BY_HOST += [[r // 2 for r in range(12)]]


def new_bucket(rank: int = 5, **changes) -> Bucket:
    common = {"block_size": 64, "rank": rank, "world_size": 12, "error_feedback": True, **changes}
    parameters = [(name, torch.zeros(numel)) for name, numel in SIZES.items()]
    [bucket] = make_buckets(parameters, min_numel=1, bucket_bytes=10**6, **common)[0]
    bucket.residuals.own.fill_(1)
    bucket.residuals.shard.fill_(1)
    bucket.residuals.quantized()
    return bucket


@pytest.mark.parametrize("error_feedback", [True, False])
@pytest.mark.parametrize("names", BY_HOST, ids=["2x6", "2x6 dealt", "3x4", "6x2"])
@pytest.mark.parametrize("rank", [0, 5, 11])
def test_a_bucket_that_is_divided_by_host_has_its_section_and_no_residuals(rank, names, error_feedback):
    bucket = new_bucket(rank, error_feedback=error_feedback)
    for _ in range(2):
        bucket.arrange(Topology.of(names), by_host=True)
        assert bucket.residuals.own.numel() == bucket.section.blocks * 64 * error_feedback
        assert not bucket.residuals.own.any() and not bucket.residuals.shard.any() and not bucket.residuals.carries


def test_a_flat_arrangement_knows_the_neighbours_and_keeps_residuals():
    bucket, apart = new_bucket(), new_bucket()
    bucket.arrange(Topology.of(BY_HOST[0]), by_host=False)
    assert bucket.arrangement.sections == apart.arrangement.sections
    assert bucket.arrangement.host_ranks == tuple(range(6)) and apart.arrangement.host_ranks == (5,)
    assert bucket.residuals.carries and torch.equal(bucket.residuals.own, apart.residuals.own)
