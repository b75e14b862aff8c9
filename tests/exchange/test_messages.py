"""What is in the messages: numbers by which ranks notice that they are not where the others are, and randomness."""

import itertools

import torch
from simulated import WORLDS, Worker, on_ranks, phases

from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.exchange.wire import GREETING_BYTES, HEADER, Greeting, Phase
from hvd_dyncomp.transport.alone import Alone

SIZES = {"a": 130, "b": 200}


def greetings(world, rank: int) -> list[Greeting]:
    places = [tensor.view(torch.uint8).view(-1, GREETING_BYTES)[rank] for tensor in world.messages(".handshake", rank)]
    return [Greeting.from_bytes(place.numpy().tobytes()) for place in places]


def step_of(message: torch.Tensor) -> int:
    return HEADER.unpack(message[: HEADER.size].numpy().tobytes())[0]


@WORLDS
def test_every_step_has_its_number(ranks, hosts):
    def program(worker: Worker) -> None:
        for step in range(4):
            worker.step(worker.noise(step))

    _, world = on_ranks(ranks, program, SIZES, 4, hosts=hosts)
    for rank in range(ranks):
        assert [greeting.step for greeting in greetings(world, rank)] == [0, 1, 2, 3]
        assert len({greeting.composition for greeting in greetings(world, rank)}) == 1
        for phase in phases(ranks, hosts):
            assert [step_of(message) for message in world.messages(f".{phase}", rank)] == [0, 1, 2, 3]


def test_residuals_are_rounded_differently_by_rank_step_bucket_and_phase():
    """And alike in a run that is repeated or resumed, whatever the names are."""
    cases = list(itertools.product((0, 1), (4, 5), (0, 1), (Phase.SCATTER, Phase.GATHER)))
    first, again = ([messages_of(*case, names).dither(phase) for *case, phase in cases] for names in ("ab", "cd"))
    assert first == again and len(set(first)) == len(cases)


def messages_of(rank: int, step: int, number: int = 0, names: str = "ab") -> Messages:
    """Of the first or the second bucket."""
    buckets, _ = make_buckets(
        [(name, torch.zeros(640)) for name in names],
        **{
            "min_numel": 1,
            "bucket_bytes": 2560,
            "block_size": 64,
            "rank": rank,
            "topology": Topology.one_rank_per_host(3),
        },
        error_feedback=True,
    )
    assert len(buckets) == 2
    return Messages(buckets[number], 4, step, Alone())
