"""Which parameter travels where."""

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
        end = 0
        for before, slot in zip([None, *bucket.slots], bucket.slots, strict=False):
            shares = slot.numel < 1024 and before is not None and before.numel < 1024 and before.small == slot.small
            assert slot.start == (end if shares else -(-end // 64) * 64)
            end = slot.start + slot.numel
        assert all(slot.bucket == index for slot in bucket.slots)
        assert [slot.index for slot in bucket.slots] == list(range(len(bucket.slots)))
        assert bucket.values * 4 <= 4000 or len(bucket.slots) == 1
        assert bucket.values == sum(slot.numel for slot in bucket.slots) and 0 <= bucket.blocks * 64 - end < 64
        assert [slot.small for slot in bucket.slots] == sorted(slot.small for slot in bucket.slots)
        for slot in bucket.slots:
            assert slot.small == (slot.numel < 10)
    for kind in (range(1, 10), range(10, 1024), range(1024, 3001)):
        order = [slot.name for bucket in buckets for slot in bucket.slots if slot.numel in kind]
        assert order == [f"p{i}" for i in reversed(range(len(sizes))) if sizes[i] in kind]


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
