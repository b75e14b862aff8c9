"""The transport of a process group, by itself."""

import gc
import os
import random
import threading
import time
import weakref
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from hvd_dyncomp import LockstepError, ddp
from hvd_dyncomp.transport import collective_handle, phase_groups, torch_distributed
from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport

THINGS = 12  # that are exchanged at a time


@pytest.fixture(scope="module")
def transport():
    return ProcessGroupTransport()


def test_who_it_is(transport, rank, size):
    assert (transport.rank, transport.size) == (rank, size)
    assert gather_json(transport, transport.host, "hosts") == list(transport.hosts())
    assert transport.local_size == transport.hosts().count(transport.host)
    assert transport.unsupported_reason(torch.device("cpu")) == ""


def phases_of(rank: int, size: int) -> dict[str, tuple[int, ...]]:
    """Among all, between two, and among all again; who is none of the two is alone."""
    pair = (0, size - 1)
    everyone = tuple(range(size))
    return {"local_scatter": everyone, "pair": pair if rank in pair else (rank,), "local_gather": everyone}


def part(thing: int, phase: str, sender: int, receiver: int) -> torch.Tensor:
    """What a rank sends another; sometimes nothing."""
    length = 0 if thing % 4 == 3 and sender < receiver else 20_000 * thing + 10 * sender + receiver
    return torch.full((length,), (thing + len(phase) + 50 * sender + 7 * receiver) % 256, dtype=torch.uint8)


def test_later_phases_start_in_any_order(transport, rank, size):
    """Another one on each rank, among torch's own collectives in the same group."""
    phases = phases_of(rank, size)
    made = transport.for_exchanges(phases)
    assert made.shared is transport and made is not transport
    names, orders = list(phases), random.Random(rank)

    def start(thing: int, phase: str):
        ranks = phases[phase]
        sent = [part(thing, phase, rank, other) for other in ranks]
        arriving = [part(thing, phase, other, rank).numel() for other in ranks]
        return made.alltoall(torch.cat(sent), ranks, list(map(len, sent)), arriving, f"thing{thing}.{phase}")

    for _ in range(3):
        theirs = [torch.ones(1000)]
        works = [dist.all_reduce(theirs[0], async_op=True)]
        under_way = {thing: (names[0], start(thing, names[0])) for thing in range(THINGS)}
        while under_way:
            ready = [thing for thing, (_, handle) in under_way.items() if made.poll(handle)]
            if not ready:
                time.sleep(1e-4)
                continue
            thing = orders.choice(ready)
            phase, handle = under_way.pop(thing)
            expected = [part(thing, phase, other, rank) for other in phases[phase]]
            assert torch.equal(made.wait(handle), torch.cat(expected)), (thing, phase)
            if phase == names[-1]:
                theirs.append(torch.ones(1000))
                works.append(dist.all_reduce(theirs[-1], async_op=True))
            else:
                later = names[names.index(phase) + 1]
                under_way[thing] = later, start(thing, later)
        for work in works:
            work.wait()
        assert all(torch.equal(each, torch.full((1000,), float(size))) for each in theirs)


def test_ranks_whose_phases_differ_all_say_so(transport, rank, size):
    """And the next model is none the worse for it."""
    mine = {"pair" if rank == size - 1 else "scatter": tuple(range(size))}
    with pytest.raises(
        LockstepError, match=f"rank 0 would exchange by scatter, rank {size - 1} by pair: give hierarch"
    ):
        transport.for_exchanges(mine)
    made = transport.for_exchanges(phases_of(rank, size))
    assert made.wait(made.sum(torch.ones(1), "it")).item() == size


@pytest.mark.parametrize("known", [True, False])
def test_gathering_vectors_of_different_lengths(transport, rank, size, known):
    """Also where nobody knows the others' lengths."""
    lengths = [70_000 * other for other in range(size)]
    mine = torch.full((lengths[rank],), rank, dtype=torch.uint8)
    got = transport.wait(transport.allgather(mine, "gather", lengths if known else None))
    assert torch.equal(got, torch.arange(size, dtype=torch.uint8).repeat_interleave(torch.tensor(lengths)))


def test_starting_does_not_block(transport, rank):
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
    for r, piece in enumerate(got.split(length)):
        assert torch.equal(piece, torch.arange(length, dtype=torch.int64).add(r).to(torch.uint8))
    assert transport.poll(handle)


def test_what_has_come_wakes_the_background(transport, rank, monkeypatch):
    """Long before it would look by itself."""
    monkeypatch.setattr(torch_distributed, "_BACKGROUND_SECONDS", 30)
    if rank == 0:
        over = threading.Event()
        handle = transport.sum(torch.ones(1), "news")

        def look() -> bool:
            if transport.poll(handle):
                over.set()
            return over.is_set()

        transport.in_background(look)
        time.sleep(0.1)
        assert not over.is_set()
        dist.barrier()
        assert over.wait(10)
    else:
        dist.barrier()
        transport.wait(transport.sum(torch.ones(1), "news"))


@pytest.mark.promise("DDP: no wait exceeds the timeout of the process group.")
@pytest.mark.parametrize("waits", ["wait", "poll"])
def test_the_time_limit_is_that_of_the_process_group(waits, rank, size):
    """Also for who polls; and what else waits for that rank ends, too."""
    made = ddp.transport(dist.new_group(timeout=timedelta(seconds=1)))
    began = time.monotonic()
    if rank != size - 1:
        handle, another = (made.sum(torch.ones(1), name) for name in ("alone", "another"))
        while waits == "poll" and not made.poll(handle):
            time.sleep(1e-3)
            assert time.monotonic() - began < 20
        # With more ranks, the others may hear first that one has given up.
        expected = TimeoutError if size == 2 else (TimeoutError, ConnectionError)
        with pytest.raises(expected, match="^alone: (not all ranks joined within the time limit|the connection)"):
            made.wait(handle)
        with pytest.raises((TimeoutError, ConnectionError), match="^another: "):
            made.wait(another)
        assert time.monotonic() - began < 10
    dist.barrier()


@pytest.mark.parametrize("absent", [0, -1])
def test_a_rank_that_does_not_even_begin(absent, rank, size):
    """It is an error in the end; who comes later has an error, too."""
    group = dist.new_group(timeout=timedelta(seconds=1.5))
    if rank != absent % size:
        with pytest.raises((TimeoutError, ConnectionError), match="not all ranks of the process group have called"):
            ProcessGroupTransport(group)
    dist.barrier()


def test_a_rank_that_has_left(rank, size):
    """What it has sent arrives. Who waits for more has an error, also from one that has heard of it and lives on."""
    made = ProcessGroupTransport()
    last = made.allgather(torch.full((100_000,), rank, dtype=torch.uint8), "last")
    if rank < size - 1:
        assert len(made.wait(last)) == 100_000 * size
        with pytest.raises(ConnectionError, match="^more: the connection to a rank was lost: "):
            made.wait(made.sum(torch.ones(1), "more"))
    else:
        made._end()  # as when Python ends
        del made, last
        gc.collect()
    dist.barrier()


def test_nothing_of_it_is_left_and_the_next_ones_work(rank, size):
    """Though addresses of earlier ones are still in the job's store."""
    before = descriptors()
    for turn in range(3):
        made = ProcessGroupTransport()
        for _ in range(2):
            model = made.for_exchanges(phases_of(rank, size))
            assert model.wait(model.sum(torch.full((1,), float(turn)), "it")).item() == turn * size
            del model
        assert gather_json(made, [rank, turn], "who") == [[other, turn] for other in range(size)]
        gone = weakref.ref(made)
        dist.barrier()
        del made
        gc.collect()
        assert gone() is None and descriptors() <= before  # those of earlier checks may go meanwhile
        dist.barrier()


@pytest.mark.parametrize("arrived", [False, True])
def test_garbage_that_a_thread_of_torchs_collects(arrived, monkeypatch, rank):
    """Such as the group of that very thread, which would wait for itself; torch ends the process then."""
    monkeypatch.setattr(torch_distributed, "_CLOSE_SECONDS", 0.1)
    made, collectors = ProcessGroupTransport(), []
    if rank == 0:
        is_over = collective_handle.CollectiveHandle._one_is_over

        def collecting(self, future):
            if arrived:
                is_over(self, future)
            gc.collect()
            collectors.append(threading.current_thread())

        monkeypatch.setattr(collective_handle.CollectiveHandle, "_one_is_over", collecting)
        made.sum(torch.ones(1), "late")
        made.cycle, gone = made, weakref.ref(made)
        del made
        dist.barrier()
        until = time.monotonic() + 20
        while not collectors and time.monotonic() < until:
            time.sleep(0.01)
        assert gone() is None and collectors[0] is not threading.main_thread()
    else:
        dist.barrier()
        with suppress(ConnectionError):  # rank 0 has left it
            made.wait(made.sum(torch.ones(1), "late"))
        del made
    dist.barrier()
    phase_groups.Groups(dist.group.WORLD, "next")  # deletes what such threads have left
    gc.collect()


def test_some_of_the_ranks(rank, size):
    group = dist.new_group([0, size - 1])
    if rank in (0, size - 1):
        made = ProcessGroupTransport(group)
        assert gather_json(made, rank, "who") == [0, size - 1]
        dist.barrier(group)
    else:
        for make in (ProcessGroupTransport, ddp.transport):
            with pytest.raises(ValueError, match=f"rank {rank} of all, is no member of the process group"):
                make(group)
    with pytest.raises(TypeError, match="group must be a process group or None, got 'all'"):
        ddp.transport("all")


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
    """The sockets of this process."""
    found = set()
    for one in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # of the folder itself
            found.add(os.readlink(one))
    return {one for one in found if one.startswith("socket:")}


def test_a_child_that_ends_leaves_the_connections(rank, size):
    """As Python ends it."""
    made = ProcessGroupTransport()
    model = made.for_exchanges(phases_of(rank, size))

    def ends() -> bool:
        weakref.finalize._exitfunc()
        torch_distributed._exit()
        return True

    assert forked(ends)
    assert gather_json(made, rank, "all there") == list(range(size))
    assert model.wait(model.sum(torch.ones(1), "it")).item() == size
    dist.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_sums_of_any_dtype(transport, dtype, rank, size):
    """In place; what travels uncompressed has an order of its own."""
    given = torch.full((3, 4), rank, dtype=dtype)
    handles = [transport.sum(given, "it.uncompressed"), transport.sum(torch.ones((), dtype=dtype), "it")]
    one, other = map(transport.wait, handles)
    assert one is given and torch.equal(given, torch.full((3, 4), sum(range(size)), dtype=dtype)) and other == size


def test_a_transport_does_not_keep_its_group(size):
    """Nor does it need it."""
    group = dist.new_group()
    made, kept = ProcessGroupTransport(group), weakref.ref(group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert kept() is None
    given = {"a": made.wait(made.sum(torch.ones(3), "a"))}
    assert given["a"].tolist() == [size] * 3
