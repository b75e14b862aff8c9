"""Collectives made of messages between two ranks: whoever is early or late, those of one name meet."""

from unittest import mock

import pytest
import test_any_order
import torch
from by_messages import MessageWorld
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import places
from test_any_order import ANY, any_program

from hvd_dyncomp.transport.collectives import Collectives
from hvd_dyncomp.transport.in_process import Deadlock


@places("2", "3", "2x2", "2+1")
@settings(max_examples=60, **ANY)
@given(data=st.data())
def test_any_program_that_stock_horovod_completes(ranks, hosts, data):
    with mock.patch.object(test_any_order, "World", MessageWorld):
        any_program(ranks, hosts, data)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_order_of_starting(data):
    """Each rank starts the same collectives in an order of its own, some of one name, and waits in another one."""
    ranks = data.draw(st.integers(1, 4))
    kinds = data.draw(st.lists(st.sampled_from(["alltoall", "allgather", "sum"]), min_size=1, max_size=5))
    names = [f"{kind} {data.draw(st.integers(0, 1))}" for kind in kinds]  # of equal ones, the k-th meet
    orders = [data.draw(st.permutations(range(len(names)))) for _ in range(ranks)]
    orders = [sorted(order, key=lambda i: (names[i], i)) if len({*names}) < len(names) else order for order in orders]
    lasts = [data.draw(st.permutations(range(len(names)))) for _ in range(ranks)]

    def program(transport):
        rank, handles, got = transport.rank, {}, {}
        for i in orders[rank]:
            kind = kinds[i]
            if kind == "alltoall":  # to rank r, r bytes
                sent = torch.full((sum(range(ranks)),), 10 * i + rank, dtype=torch.uint8)
                handles[i] = transport.alltoall(sent, list(range(ranks)), names[i])
            elif kind == "allgather":
                handles[i] = transport.allgather(torch.full((rank,), 10 * i + rank, dtype=torch.uint8), names[i])
            else:
                handles[i] = transport.sum(torch.tensor([10.0 * i, rank]), names[i])
        for i in lasts[rank]:
            got[i] = transport.wait(handles[i]).tolist()
        return got

    choices = data.draw(st.lists(st.integers(0, 11), min_size=1, max_size=30))
    for rank, got in enumerate(MessageWorld(ranks, choices).run(program)):
        for i, kind in enumerate(kinds):
            expected = {
                "alltoall": [10 * i + sender for sender in range(ranks) for _ in range(rank)],
                "allgather": [10 * i + sender for sender in range(ranks) for _ in range(sender)],
                "sum": [10.0 * i * ranks, sum(range(ranks))],
            }[kind]
            assert got[i] == expected, f"{names[i]} on rank {rank}"


def test_a_sum_is_made_when_its_memory_has_been_sent():
    """Otherwise a rank that is behind would get the sum of the others for one of its terms."""

    def program(transport):
        own = torch.full((4,), float(transport.rank + 1))
        handle = transport.sum(own, "it")
        before = own.clone()
        while not transport.poll(handle):
            assert torch.equal(own, before)
        return transport.wait(handle).tolist(), own.tolist()

    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        choices = torch.randint(0, 12, (31,), generator=generator).tolist()
        assert MessageWorld(3, choices).run(program) == [([6.0] * 4, [6.0] * 4)] * 3


def test_what_never_comes_is_a_deadlock():
    with pytest.raises(Deadlock, match="rank 0 for of 0"):
        MessageWorld(2).run(lambda transport: transport.wait(transport.sum(torch.ones(1), f"of {transport.rank}")))


def test_a_rank_that_is_lost():
    """What it has sent still counts; what waits for more of it has an error, and so has what begins later."""
    sent = []
    ours = Collectives(0, 3, lambda rank, key, body, done: (sent.append((rank, key, body)), done()))
    theirs = {rank: Collectives(rank, 3, lambda to, *rest: None) for rank in (1, 2)}
    for rank, other in theirs.items():
        other._post = lambda to, key, body, done, rank=rank: to == 0 and ours.arrived(rank, key, body)
    one = torch.ones(1, dtype=torch.uint8)
    waiting = ours.allgather(one, "waits")
    theirs[1].allgather(one, "waits")
    theirs[2].allgather(one, "came before")
    theirs[1].allgather(one, "came before")
    ours.lost(2, ConnectionError("rank 2 is gone"))
    assert waiting.over and not waiting.missing - {2}
    with pytest.raises(ConnectionError, match="rank 2"):
        waiting.result()
    assert ours.allgather(one, "came before").result().tolist() == [1, 1, 1]
    late = ours.allgather(one, "late")
    assert late.over
    with pytest.raises(ConnectionError, match="rank 2"):
        late.result()
    theirs[1].allgather(one, "late")  # nobody is left who wants it
