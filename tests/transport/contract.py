"""What every `Transport` promises (`transport/base.py`), as checks that all ranks make together, each with its own end.

`test_contract.py` runs them on ranks in one process, and the files of the same name in `ddp/on_ranks/` and
`on_horovod/on_ranks/` over Gloo and over Horovod. A new transport gets a file like these.
"""

import copy
import time
from collections.abc import Callable

import torch

from hvd_dyncomp.transport.base import Transport, gather_json

SECONDS = 20.0  # after which what should have come never will


def part(sender: int, receiver: int) -> torch.Tensor:
    """What a rank sends another: as many bytes as say who it is for; from some to some, nothing."""
    length = 0 if (sender, receiver) == (1, 0) else 1000 * sender + 7 * receiver + 1
    return torch.full((length,), 16 * sender + receiver, dtype=torch.uint8)


def who_it_is(transport: Transport) -> None:
    assert 0 <= transport.rank < transport.size and transport.local_size >= 1
    everyone = gather_json(transport, [transport.rank, transport.host], "contract.who")
    assert [rank for rank, _ in everyone] == list(range(transport.size))
    assert everyone[transport.rank][1] == transport.host
    assert list(transport.hosts()) == [host for _, host in everyone]
    assert transport.unsupported_reason(torch.device("cpu")) == ""
    assert copy.deepcopy([transport])[0] is transport


def alltoall_among_all(transport: Transport) -> None:
    """Each rank gets exactly what was sent to it, in the order of the ranks, where it wants it."""
    rank, everyone = transport.rank, range(transport.size)
    sent = [part(rank, other) for other in everyone]
    expected = torch.cat([part(other, rank) for other in everyone])
    arriving = [part(other, rank).numel() for other in everyone]
    for room in (None, torch.zeros(sum(arriving), dtype=torch.uint8)):
        name = f"contract.alltoall.{room is None}"
        handle = transport.alltoall(torch.cat(sent), everyone, list(map(len, sent)), arriving, name, room)
        received = transport.wait(handle)
        assert torch.equal(received, expected)
        assert room is None or received.data_ptr() == room.data_ptr()


def alltoall_among_some(transport: Transport) -> None:
    """All ranks of the transport start it, each among ranks of its own."""
    rank = transport.rank
    ranks = [other for other in range(transport.size) if other % 2 == rank % 2]
    sent, arriving = [part(rank, other) for other in ranks], [part(other, rank).numel() for other in ranks]
    exchange = transport.for_exchanges({"scatter": ranks})
    handle = exchange.alltoall(torch.cat(sent), ranks, list(map(len, sent)), arriving, "contract.some.scatter")
    assert torch.equal(exchange.wait(handle), torch.cat([part(other, rank) for other in ranks]))
    assert exchange.shared is transport.shared


def allgather(transport: Transport) -> None:
    """Of vectors of any lengths, whether the others' lengths are known or not."""
    lengths = [5000 * other for other in range(transport.size)]
    mine = torch.full((lengths[transport.rank],), transport.rank, dtype=torch.uint8)
    expected = torch.arange(transport.size, dtype=torch.uint8).repeat_interleave(torch.tensor(lengths))
    for known in (lengths, None):
        handle = transport.allgather(mine, f"contract.allgather.{known is None}", known)
        assert torch.equal(transport.wait(handle), expected)


def sums(transport: Transport) -> None:
    """In place, of every dtype that the transport takes, and of whole numbers."""
    total = sum(range(transport.size))
    floating = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for dtype in [torch.int64, *filter(transport.takes, floating)]:
        given = torch.full((3, 4), transport.rank, dtype=dtype)
        received = transport.wait(transport.sum(given, f"contract.sum.{dtype}"))
        assert torch.equal(given, torch.full((3, 4), total, dtype=dtype)) and torch.equal(received, given)


def several_in_flight(transport: Transport) -> None:
    """Starting blocks nobody, and what is started together may be waited for in any order."""
    handles = [transport.sum(torch.full((100,), float(i)), f"contract.flight.{i}") for i in range(8)]
    for i in reversed(range(8)):
        assert transport.wait(handles[i]).eq(i * transport.size).all()


def polling(transport: Transport) -> None:
    """A collective is over at some time for who only polls, and then `wait` returns at once."""
    handle, until = transport.sum(torch.ones(1), "contract.poll"), time.monotonic() + SECONDS
    while not transport.poll(handle):
        assert time.monotonic() < until
    assert transport.wait(handle).item() == transport.size


def background(transport: Transport) -> None:
    """Work goes on while the program is busy, until it says that it is over."""
    handle, calls = transport.sum(torch.ones(1), "contract.background"), [0]

    def work() -> bool:
        calls[0] += 1
        return transport.poll(handle)

    transport.in_background(work)
    transport.wait(transport.sum(torch.ones(1), "contract.background.begun"))
    until = time.monotonic() + SECONDS
    while transport.size > 1 and not calls[0]:  # alone, nothing is waited for
        assert time.monotonic() < until
        transport.poll(handle)
    assert transport.wait(handle).item() == transport.size
    gather_json(transport, calls[0], "contract.background.over")


def labels(transport: Transport) -> None:
    """Equal on all ranks that ask in the same order, and never twice the same."""
    mine = [transport.new_label("contract") for _ in range(3)]
    assert len(set(mine)) == 3
    assert gather_json(transport, mine, "contract.labels") == [mine] * transport.size


def abort(transport: Transport) -> None:
    """It ends the exchanges of one model, and of nothing else."""
    everyone, rank = range(transport.size), transport.rank
    given_up, other = (transport.for_exchanges({"scatter": everyone}) for _ in range(2))
    gather_json(transport, None, "contract.abort.made")  # all ranks have: what is torn down is nobody's way to meet
    given_up.abort()
    sent, arriving = [part(rank, to) for to in everyone], [part(of, rank).numel() for of in everyone]
    handle = other.alltoall(torch.cat(sent), everyone, list(map(len, sent)), arriving, "contract.abort.scatter")
    assert torch.equal(other.wait(handle), torch.cat([part(of, rank) for of in everyone]))
    assert gather_json(given_up.shared, rank, "contract.abort.shared") == list(everyone)


CHECKS: list[Callable[[Transport], None]] = [
    *(who_it_is, alltoall_among_all, alltoall_among_some, allgather, sums, several_in_flight, polling),
    *(background, labels, abort),
]
