"""The simulated network: as strict as the real one, and under the control of the choices."""

import types

import pytest
import torch

from hvd_dyncomp.simulate import Deadlock, InProcessTransport, Mismatch, World


def test_collectives():
    def program(transport: InProcessTransport):
        rank = transport.rank
        tensor = torch.full((2,), float(rank + 1))
        total = transport.wait(transport.sum(tensor, "sum"))
        gathered = transport.wait(transport.allgather(torch.full((rank + 1,), rank, dtype=torch.uint8), "gather"))
        sent = torch.arange(6, dtype=torch.uint8) + 10 * rank
        received = transport.wait(transport.alltoall(sent, range(3), [1, 2, 3], [rank + 1] * 3, "scatter"))
        return tensor, total, gathered.tolist(), received.tolist()

    world = World(3)
    for rank, (tensor, total, gathered, received) in enumerate(world.run(program)):
        assert torch.equal(tensor, torch.full((2,), 6.0)), "a sum is in the ranks' own memory"
        assert torch.equal(total, tensor)
        assert gathered == [0, 1, 1, 2, 2, 2]
        part = [[0], [1, 2], [3, 4, 5]][rank]
        assert received == [value + 10 * sender for sender in range(3) for value in part]
    # 2 (N - 1) / N of 8 bytes, N - 1 times its own piece, all but its own part.
    assert world.bytes_sent == [10 + 2 * (rank + 1) + 6 - (rank + 1) for rank in range(3)]


class OnGpu(torch.Tensor):
    """Passes for one on a GPU."""

    is_cuda = True


def test_on_a_gpu_what_is_sent_is_there_when_it_is_read(monkeypatch):
    """Who reads it may do so in another stream: what was queued, also by the last one that started, is waited for."""
    waited = []
    stream = types.SimpleNamespace(synchronize=lambda: waited.append(1))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)

    def program(transport: InProcessTransport):
        sent = torch.ones(2, dtype=torch.uint8).as_subclass(OnGpu)
        transport.wait(transport.allgather(sent, "gather"))
        transport.wait(transport.alltoall(sent, [0, 1], [1, 1], [1, 1], "scatter"))

    World(2).run(program)
    assert len(waited) == 4


@pytest.mark.timeout(20)
def test_what_never_comes_is_a_deadlock_that_names_it():
    def program(transport: InProcessTransport):
        transport.wait(transport.sum(torch.ones(1), f"of {transport.rank}"))

    with pytest.raises(Deadlock, match="rank 0 for of 0, rank 1 for of 1"):
        World(2).run(program)


@pytest.mark.parametrize(
    ("other", "text"),
    [("kind", "rank 1 starts allgather it, .* under way as sum"), ("twice", "rank 0 starts sum"), ("shape", "sum")],
)
def test_collectives_that_do_not_fit_together(other, text):
    def program(transport: InProcessTransport):
        if other == "kind" and transport.rank:
            handle = transport.allgather(torch.ones(4, dtype=torch.uint8), "it")
        else:
            handle = transport.sum(torch.ones(1 + (other == "shape" and transport.rank)), "it")
        if other == "twice":
            transport.sum(torch.ones(1), "it")
        transport.wait(handle)

    with pytest.raises(Mismatch, match=text):
        World(2).run(program)


@pytest.mark.parametrize("kind", ["alltoall", "allgather"])
def test_what_a_rank_expects_is_what_is_sent(kind):
    """Other transports make room for so many bytes before they come."""

    def program(transport: InProcessTransport, expected: int):
        sent = torch.ones(4, dtype=torch.uint8)
        if kind == "allgather":
            return transport.wait(transport.allgather(sent, "it", [4, expected]))
        splits, arriving = ([1, 3], [1, 4]) if transport.rank == 0 else ([4, 0], [3, 0])
        arriving[1] += (expected - 4) * (transport.rank == 0)
        return transport.wait(transport.alltoall(sent, [0, 1], splits, arriving, "it"))

    World(2).run(lambda transport: program(transport, 4))
    with pytest.raises(Mismatch, match=r"it: \[\d, 4\] bytes come to rank 0, which expects \[\d, 5\]"):
        World(2).run(lambda transport: program(transport, 5))


def test_choices_decide_who_goes_on_and_a_run_can_be_repeated():
    def program(transport: InProcessTransport):
        handle = transport.sum(torch.zeros(1), "begin")
        for _ in range(5):
            order.append(transport.rank)
            transport.poll(handle)
        transport.wait(handle)

    orders = []
    for choices in ([], [1, 0, 2], [1, 0, 2], [1, 1, 0, 1, 2]):
        order: list[int] = []
        World(3, choices).run(program)
        orders.append(tuple(order))
    assert orders[0] == (0,) * 5 + (1,) * 5 + (2,) * 5, "without choices a rank goes on until it has to wait"
    assert orders[1] == orders[2] and len(set(orders)) == 3


@pytest.mark.parametrize("choices", [[], [0]])
def test_who_is_no_program_of_the_world_cannot_wait(choices):
    first, _ = World(2, choices).transports
    with pytest.raises(Deadlock, match="rank 0 waits for it"):
        first.wait(first.sum(torch.ones(1), "it"))


def test_what_was_raised_first_is_raised():
    def program(transport: InProcessTransport):
        if transport.rank == 1:
            raise RuntimeError("of rank 1")
        transport.wait(transport.sum(torch.ones(1), "it"))

    with pytest.raises(RuntimeError, match="of rank 1"):
        World(2).run(program)
