"""The transport of a process group, by itself."""

import gc
import ipaddress
import os
import random
import socket
import subprocess
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hvd_dyncomp import ddp
from hvd_dyncomp.transport import address, connect, torch_distributed, visitors
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
    """Who waits for a while only is told, and says it."""
    monkeypatch.setattr(torch_distributed, "LATE_SECONDS", 0.2)
    made = ProcessGroupTransport(timeout=30)
    dist.barrier()
    if rank == size - 1:
        time.sleep(0.5)
    handle = made.sum(torch.ones(1), "late")
    missing = [size - 1] if rank != size - 1 else []
    if waits == "wait_for" and not made.wait_for(handle, 0.2):
        assert made.missing(handle) == missing
    assert made.wait(handle).item() == size and made.missing(handle) == []
    said = [record.getMessage() for record in caplog.records if "late" in record.getMessage()]
    assert len(said) == (waits == "wait" and rank != size - 1), said
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
    before = set(threading.enumerate())  # those of earlier checks may end meanwhile
    made = ProcessGroupTransport()
    threads, this = set(threading.enumerate()) - before, weakref.ref(made)
    assert any(thread.name == "hvd_dyncomp.mesh" for thread in threads)
    del made
    gc.collect()
    assert this() is None
    assert not threads & set(threading.enumerate())


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


def assert_closed(connection: socket.socket) -> None:
    connection.settimeout(20)
    with suppress(ConnectionResetError):
        assert not connection.recv(1)


def test_strangers_are_not_let_in_and_delay_nobody(transport, monkeypatch, rank, size):
    """Who connects without the secret, says nothing or is gone at once, however many there are."""
    silent = []
    real = connect._exchanged

    def exchanged(card, *arguments):
        cards = real(card, *arguments)
        if rank < size - 1:
            address = card["address"], card["port"]
            for said in (b"", b"\0" * 36, b"\0" * 7):
                with socket.create_connection(address) as stranger:
                    stranger.sendall(said)
            for i in range(150):
                silent.append(socket.create_connection(address))
                silent[-1].sendall(b"\0" * (i % 9))
                silent.append(socket.socket(socket.AF_UNIX))
                silent[-1].connect("\0" + card["local"])
        return cards

    monkeypatch.setattr(connect, "_exchanged", exchanged)
    monkeypatch.setattr(visitors, "HELLO_SECONDS", 60)
    made = ProcessGroupTransport(timeout=20)
    assert gather_json(made, rank, "who") == list(range(size))
    for each in silent:
        assert_closed(each)
        each.close()
    dist.barrier()
    made.close()


def test_who_is_slow_to_say_who_it_is_is_sent_away():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as stranger,
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(visitors, "HELLO_SECONDS", 0.1)
            waiting = visitors.Visitors([listener], b"s" * 32, [1])
            with pytest.raises(TimeoutError, match=r"ranks \[1\] have not connected"):
                waiting.receive(time.monotonic() + 1)
        assert_closed(stranger)
        waiting.close()


def test_only_the_announced_address_is_listened_on(monkeypatch):
    """Where it is known to be the same for all."""
    with address.listening("127.0.0.1", 1) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    for name in ("a.name", "192.0.2.1"):  # of another host, as behind a translation of addresses
        with address.listening(name, 1) as listener:
            assert not int(ipaddress.ip_address(listener.getsockname()[0]))
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert address.announced() in ("127.0.0.1", "::1")


def test_a_rank_that_does_not_even_begin(caplog, monkeypatch, rank, size):
    """It is missed at once in words, and an error in the end."""
    group = dist.new_group()
    monkeypatch.setattr(connect, "LATE_SECONDS", 0.2)
    if rank < size - 1:
        with pytest.raises(TimeoutError, match="not all ranks of the process group have called compress"):
            ProcessGroupTransport(group, timeout=1)
        said = [record.getMessage() for record in caplog.records]
        assert said == [
            f"rank {rank} has waited 0.2 s for all ranks of its process group to call compress or transport"
        ]
    dist.barrier()


def forked(check) -> bool:
    """What a function returns in a child."""
    child = os.fork()
    if child == 0:
        try:
            os._exit(bool(check()))
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1


def descriptors() -> set[str]:
    """Sockets of this process, and what waits for several."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the folder itself
            found.add(os.readlink(one))
    return {one for one in found if one.startswith("socket:")}


def polls() -> int:
    return sum("eventpoll" in os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists())


def test_children_have_no_connections(monkeypatch, rank, size):
    """Nor while these are made; they end as they like, and the parent does not notice."""
    before, counted = descriptors(), polls()
    real = connect._far

    def far(*arguments):
        connection = real(*arguments)
        assert len(descriptors() - before) >= 3
        assert forked(lambda: not descriptors() - before)
        return connection

    monkeypatch.setattr(connect, "_far", far)
    monkeypatch.setattr(connect, "_near", lambda card, host: None)
    made = ProcessGroupTransport()
    assert len(descriptors() - before) == size - 1 + 2
    assert forked(lambda: not descriptors() - before and polls() <= counted)
    ours = descriptors() - before
    listed = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, close_fds=False, check=True)
    assert not any(one in listed.stdout for one in ours)

    def ends() -> bool:
        made.close()
        weakref.finalize._exitfunc()  # as when Python ends
        return True

    assert forked(ends)
    assert gather_json(made, rank, "all there") == list(range(size))
    dist.barrier()
    made.close()


def test_sums_of_many_tensors_of_any_dtype(transport, rank, size):
    """Another order of the dtypes, a size of 0 and one of 1; all in place."""
    given = {
        "a": torch.arange(5000.0) * (rank + 1),
        "b": torch.full((3, 4), rank + 1j),
        "c": torch.ones((), dtype=torch.float64),
        "d": torch.ones(7, dtype=torch.float16),
        "e": torch.zeros(0),
        "f": torch.full((2,), float(rank)),
    }
    kept = list(given.values())
    transport.sum_all(given)
    ranks = sum(range(size))
    assert torch.equal(kept[0], torch.arange(5000.0) * (ranks + size))
    assert torch.equal(kept[1], torch.full((3, 4), ranks + size * 1j))
    assert kept[2] == size and torch.equal(kept[3], torch.full((7,), float(size), dtype=torch.float16))
    assert torch.equal(kept[5], torch.full((2,), float(ranks)))


def test_sums_end_by_the_time_limit_of_the_group(rank):
    """A rank that does not come is an error."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    made = ProcessGroupTransport(group)
    if rank:
        before = time.monotonic()
        with pytest.raises(RuntimeError):
            made.sum_all({"a": torch.ones(3)})
        assert time.monotonic() - before < 20
    dist.barrier()
    made.close()


def test_a_transport_does_not_keep_its_group():
    group = dist.new_group()
    made, kept = ProcessGroupTransport(group), weakref.ref(group)
    made.sum_all({"a": torch.ones(3)})
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="the process group of this transport has been destroyed"):
        made.sum_all({"a": torch.ones(3)})
    made.close()
