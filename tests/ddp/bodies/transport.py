"""The transport of a process group, by itself."""

import gc
import random
import threading
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hvd_dyncomp import ddp
from hvd_dyncomp.transport import torch_distributed
from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport


@pytest.fixture(scope="module")
def transport():
    made = ProcessGroupTransport()
    yield made
    made.close()


def test_who_it_is(transport, rank, size):
    assert (transport.rank, transport.size) == (rank, size)
    hosts = gather_json(transport, transport.host, "hosts")
    assert transport.local_size == hosts.count(transport.host)
    assert transport.obstacle(torch.device("cpu")) == ""


def test_each_in_an_order_of_its_own(transport, rank, size):
    """Among torch's own collectives in the same group, which do not notice."""
    names = [f"{kind}.{i}" for i in range(30) for kind in ("alltoall", "allgather", "sum")]
    orders = random.Random(rank)
    for _ in range(3):
        handles, theirs = {}, []
        for name in orders.sample(names, len(names)):
            if name.startswith("alltoall"):
                mine = torch.full((1000 * size,), rank, dtype=torch.uint8)
                handles[name] = transport.alltoall(mine, [1000] * size, name)
            elif name.startswith("allgather"):
                handles[name] = transport.allgather(torch.full((rank * 70_000,), rank, dtype=torch.uint8), name)
            else:
                handles[name] = transport.sum(torch.full((5,), rank, dtype=torch.int64), name)
            if len(handles) % 10 == 0:
                theirs.append(torch.ones(1000))
                dist.all_reduce(theirs[-1])
        for name in orders.sample(names, len(names)):
            got = transport.wait(handles[name])
            if name.startswith("alltoall"):
                assert torch.equal(got, torch.arange(size, dtype=torch.uint8).repeat_interleave(1000))
            elif name.startswith("allgather"):
                counts = torch.arange(size) * 70_000
                assert torch.equal(got, torch.arange(size, dtype=torch.uint8).repeat_interleave(counts))
            else:
                assert got.tolist() == [sum(range(size))] * 5
        assert all(torch.equal(each, torch.full((1000,), float(size))) for each in theirs)


def test_starting_does_not_block(transport, rank, size):
    """Nor does polling, while nobody reads; what is large comes whole."""
    length = 2**24
    if rank:
        dist.barrier()
    mine = torch.arange(length, dtype=torch.int64).add(rank).to(torch.uint8)
    handle = transport.allgather(mine, "large")
    if rank == 0:
        assert not transport.poll(handle)
        dist.barrier()
    got = transport.wait(handle)
    for r, part in enumerate(got.split(length)):
        assert torch.equal(part, torch.arange(length, dtype=torch.int64).add(r).to(torch.uint8))
    assert transport.poll(handle)


def test_what_has_come_wakes_the_background(transport, rank):
    """Long before it would look by itself."""
    if rank == 0:
        seen, over = [], threading.Event()
        handle = transport.sum(torch.ones(1), "news")

        def look() -> bool:
            seen.append(time.perf_counter())
            if transport.poll(handle):
                over.set()
            return over.is_set()

        transport.in_background(look)
    dist.barrier()
    if rank == 0:
        assert over.wait(10) and len(seen) >= 1
    else:
        transport.wait(transport.sum(torch.ones(1), "news"))


def test_a_rank_that_does_not_come(size):
    short = ProcessGroupTransport(timeout=timedelta(seconds=0.5))
    handle = short.sum(torch.ones(1), f"alone.{short.rank}")
    another = short.sum(torch.ones(1), f"another.{short.rank}")
    others = sorted(set(range(size)) - {short.rank})
    with pytest.raises(TimeoutError, match=rf"alone.{short.rank}: nothing has come from ranks \[{str(others)[1:-1]}\]"):
        short.wait(handle)
    began = time.monotonic()  # what else waits for them does not wait as long again
    with pytest.raises(TimeoutError, match=r"alone.\d: nothing has come"):
        short.wait(another)
    assert time.monotonic() - began < 0.4
    dist.barrier()
    short.close()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "8", None, timedelta(0), timedelta.max])
def test_a_time_limit_that_is_none(timeout):
    with pytest.raises(ValueError, match="timeout must be .*, got "):
        ProcessGroupTransport(timeout=timeout)


@pytest.mark.parametrize("waits", ["wait", "wait_for"])
def test_who_waits_long_says_for_whom_once(waits, monkeypatch, caplog, rank, size):
    monkeypatch.setattr(torch_distributed, "_LATE_SECONDS", 0.2)
    made = ProcessGroupTransport(timeout=30)
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.5)
    handle = made.sum(torch.ones(1), "late")
    while waits == "wait_for" and not made.wait_for(handle, 1e-3):
        pass
    assert made.wait(handle).item() == size
    said = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert len(said) == (rank != size - 1), said
    for line in said:
        assert f"rank {rank} has waited 0 s for late: nothing has come from ranks [{size - 1}]" in line
        assert "the time limit is 30 s" in line
    dist.barrier()
    made.close()


def test_one_time_limit_for_all_waits_of_a_group():
    """That of the latest call that gives one; it holds for `Controller.step`, which polls."""
    group = dist.new_group()
    made = ddp.transport(group, timeout=60)
    assert ddp.transport(group) is ddp.transport(group, timeout=timedelta(seconds=0.3)) is made
    handle = made.sum(torch.ones(1), f"alone.{made.rank}")
    began = time.monotonic()
    while not made.wait_for(handle, 1e-3):
        assert time.monotonic() - began < 20
    with pytest.raises(TimeoutError, match=r"nothing has come from ranks .* in 0.3 s"):
        made.wait(handle)
    dist.barrier()
    made.close()


def test_a_rank_that_has_left(rank, size):
    """What it has sent arrives; who waits for more has an error that names it."""
    made = ProcessGroupTransport()
    last = made.allgather(torch.full((100_000,), rank, dtype=torch.uint8), "last")
    if rank == size - 1:
        made.close()
        dist.barrier()
        return
    assert len(made.wait(last)) == 100_000 * size
    with pytest.raises(ConnectionError, match=f"rank {size - 1} was lost"):
        made.wait(made.sum(torch.ones(1), "more"))
    with pytest.raises(ConnectionError, match=f"rank {size - 1} was lost"):
        made.wait(made.sum(torch.ones(1), "still more"))
    dist.barrier()
    made.close()


def test_nothing_of_it_is_left():
    made = ProcessGroupTransport()
    before, this = threading.active_count(), weakref.ref(made)
    del made
    gc.collect()
    assert this() is None
    assert threading.active_count() == before - 1


def test_some_of_the_ranks(rank, size):
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        made = ProcessGroupTransport(group)
        assert gather_json(made, rank, "who") == [0, size - 1]
        dist.barrier(group)
        made.close()
    else:
        for make in (ProcessGroupTransport, ddp.transport):
            with pytest.raises(ValueError, match=f"rank {rank} of all, is no member of the process group"):
                make(group)
    with pytest.raises(TypeError, match="group must be a process group or None, got 'all'"):
        ddp.transport("all")


def test_ranks_of_one_host_use_no_network(monkeypatch, rank, size):
    """Where their names are the same and they can reach each other so; and by TCP where they cannot."""
    from hvd_dyncomp.transport import connect

    families = []
    for reach in (connect._near, lambda card, host: None):
        monkeypatch.setattr(connect, "_near", reach)
        found, hosts = connect.connected(None, "here" if rank < 2 else "elsewhere", 30)
        assert hosts == (["here"] * 2 + ["elsewhere"] * size)[:size]
        families.append([found[other].family.name if other in found else "" for other in range(size)])
        dist.barrier()
        for connection in found.values():
            connection.close()
    near = [other != rank and (other < 2) == (rank < 2) for other in range(size)]
    assert families[0] == ["AF_UNIX" if near[r] else families[1][r] for r in range(size)]
    assert "AF_UNIX" not in families[1]


def test_a_stranger_is_not_let_in(transport, monkeypatch, rank, size):
    """Who connects without the secret, says nothing or is gone at once."""
    import socket

    from hvd_dyncomp.transport import connect

    real = connect._exchanged

    def exchanged(card, group):
        cards = real(card, group)
        if rank == 0:
            for said in (b"", b"\0" * 36):
                with socket.create_connection(("localhost", card["port"])) as stranger:
                    stranger.sendall(said)
        return cards

    monkeypatch.setattr(connect, "_exchanged", exchanged)
    made = ProcessGroupTransport()
    assert gather_json(made, rank, "who") == list(range(size))
    dist.barrier()
    made.close()
