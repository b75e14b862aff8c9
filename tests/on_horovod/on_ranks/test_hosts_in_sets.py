"""Process sets whose ranks are on several hosts. For five ranks, which say themselves on which host they are.

A rank has another number in a set than among all workers.
"""

from __future__ import annotations

import logging

import horovod.torch as hvd
import pytest
import torch
from placement import place
from problem import Problem, assert_close

from hvd_dyncomp import Controller, DynamicQuantizer, Static

pytestmark = pytest.mark.timeout(120, method="thread")


@pytest.fixture(params=["two by two", "crossed", "one worker a host", "one host", "uneven"])
def case(request):
    """Where all ranks are, which are in the set, and the hosts of the set by its own ranks."""
    return {
        "two by two": ([9, 0, 0, 1, 1], [1, 2, 3, 4], [[0, 1], [2, 3]]),
        "crossed": ([0, 0, 1, 1, 0], [0, 2, 3, 4], [[0, 3], [1, 2]]),
        "one worker a host": ([0, 0, 1, 1, 1], [1, 3], [[0], [1]]),
        "one host": ([0, 0, 1, 1, 1], [3, 4], [[0, 1]]),
        "uneven": ([0, 0, 0, 1, 1], [1, 2, 4], [[0, 1], [2]]),
    }[request.param]


@pytest.fixture
def process_set(case):
    made = hvd.add_process_set(case[1])
    yield made
    hvd.barrier()
    hvd.remove_process_set(made)


@pytest.mark.parametrize("bits", [1, 16, 32])
def test_a_set_is_arranged_by_the_hosts_of_its_own_ranks(case, process_set, bits, rank, request, monkeypatch, caplog):
    everywhere, members, hosts = case
    if rank not in members:
        return
    place(monkeypatch, everywhere)
    quantizer = DynamicQuantizer(Controller(Static(bits)), bucket_bytes=30_000)
    problem = Problem(
        names=["long", "matrix", "odd"],
        prefix=f"{request.node.name}.",
        compression=quantizer,
        process_set=process_set,
    )
    delivered, exact = torch.zeros(5000), torch.zeros(5000)
    with caplog.at_level(logging.INFO, logger="hvd_dyncomp"):
        for step in range(3):
            wanted = problem.draw(step)
            got = problem.reduce(wanted)["long"]
            mean = hvd.allreduce(wanted["long"], name=f"mean.{step}", process_set=process_set)
            everyone = hvd.allgather(got[None], name=f"got.{step}", process_set=process_set)
            assert (everyone.view(torch.int32) == everyone.view(torch.int32)[0]).all()
            delivered += got
            exact += mean
    assert_close(delivered, exact, bits)
    if bits < 32:  # otherwise nothing is owed yet, and no bucket was divided
        assert quantizer.state_dict()["hosts"] == hosts

    traffic = quantizer.meter.total()
    if len(hosts) == 1:
        assert traffic.leaving_bytes == 0
    said = [record.getMessage() for record in caplog.records if "workers" in record.getMessage()]
    by_host = [text for text in said if "hierarchical exchange" in text]
    uneven = [text for text in said if "different numbers of workers: 2, 1" in text]
    assert len(by_host) == (process_set.rank() == 0 and [len(host) for host in hosts] == [2, 2])
    assert len(uneven) == (process_set.rank() == 0 and len(members) == 3)
