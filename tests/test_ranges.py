"""What a profiler is shown of an exchange, and that nothing of it is done where none runs."""

import contextlib
from collections import Counter

import pytest
from simulated import by_host, on_ranks, phases, places
from torch.autograd import profiler

SIZES = {"a": 130, "b": 130, "c": 130}
BUCKETS = {"bucket_bytes": 1}  # one for every parameter

# What of ours is done with what the collectives of a phase have brought; decoding is once for each section.
WORK = {"local_scatter": "sum_on_host", "scatter": "reduce"}


@pytest.fixture
def seen(monkeypatch) -> Counter[str]:
    """Our ranges, of all threads; torch marks some itself. In tests/launch/test_train.py a profiler sees them."""
    names: Counter[str] = Counter()

    def record(name: str) -> contextlib.nullcontext:
        package, _, what = name.partition(".")
        names.update([what] if package == "hvd_dyncomp" else [])
        return contextlib.nullcontext()

    monkeypatch.setattr(profiler, "record_function", record)
    return names


@places("2", "3", "2x2", "3x2")
def test_every_bucket_has_its_ranges(ranks, hosts, seen, monkeypatch):
    monkeypatch.setattr(profiler, "_is_profiler_enabled", True)
    on_ranks(
        ranks, lambda worker: [worker.step(worker.noise(step)) for step in (0, 1)], SIZES, 4, **BUCKETS, hosts=hosts
    )
    exchanges = 2 * len(SIZES) * ranks  # steps, buckets, ranks
    collectives = phases(ranks, hosts)
    expected = Counter(encode=exchanges, wait=exchanges * len(collectives))
    expected["decode"] = exchanges * (hosts.count(0) if by_host(hosts) else 1)
    expected += Counter({WORK[phase]: exchanges for phase in collectives if phase in WORK})
    if by_host(hosts):
        expected["scatter_on_host"] = exchanges
    assert seen.pop("agree") >= 2 * ranks
    assert seen == expected


def test_without_a_profiler_nothing_is_recorded(seen):
    on_ranks(2, lambda worker: worker.step(worker.noise(0)), SIZES, 4)
    assert not seen
