"""What is in the messages: numbers by which ranks notice that they are not where the others are, and randomness."""

import itertools

import torch
from coded import HEADER_BYTES
from simulated import WORLDS, Worker, on_ranks, phases

from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.wire import GREETING_BYTES, HEADER, Greeting, Phase

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


def payloads(world, phase: str, rank: int) -> list[bytes]:
    """Behind the first header of each message of a rank; where there are several messages, they differ anyway."""
    return [message[HEADER_BYTES:].numpy().tobytes() for message in world.messages(f".{phase}", rank)]


def stochastic(ranks: int, steps: int = 3, values: int = 640, **arguments):
    """A world whose ranks have sent the same gradient, which all rounding but a random one treats alike."""

    def program(worker: Worker) -> None:
        gradient = torch.linspace(-1, 1, 64).repeat(values // 64)
        for _ in range(steps):
            worker.step({name: gradient for name in worker.parameters})

    sizes = {"a": values, "b": values}
    arguments = {"rounding": "stochastic", "error_feedback": False, "bucket_bytes": 1, **arguments}
    return on_ranks(ranks, program, sizes, 4, **arguments)[1]


@WORLDS
def test_stochastic_rounding_differs_by_rank_by_step_and_by_bucket(ranks, hosts):
    world, again = (*(stochastic(ranks, hosts=hosts) for _ in range(2)),)
    rounded = [phase for phase in phases(ranks, hosts) if "local" not in phase]
    first = rounded[0]
    drawn = [payload for rank in range(ranks) for payload in payloads(world, first, rank)]
    assert len(set(drawn)) == len(drawn) == ranks * 3 * 2, "two messages were rounded alike"
    for rank in range(ranks):
        for phase in rounded:
            assert payloads(world, phase, rank) == payloads(again, phase, rank), "it cannot be repeated"


def test_stochastic_rounding_differs_by_block():
    """Whole message or shards: a value's randomness is its own, wherever in the bucket it lies."""
    for ranks in (2, 3):
        world = stochastic(ranks, values=64 * 6)
        message = world.messages(f".{phases(ranks, ())[0]}", 0)[0]
        shards = message.split(len(message) // (1 if ranks == 2 else 3))
        blocks = torch.cat([shard[HEADER_BYTES:].view(-1, 34) for shard in shards])
        assert len(blocks) == 6 and len(blocks.unique(dim=0)) == 6


def test_the_two_roundings_of_a_rank_differ():
    """One value that every rank sends exactly: its owner rounds the sum with other randomness than its own version."""
    messages = messages_of(rank=1, step=5)
    assert messages.noise(Phase.SCATTER).key != messages.noise(Phase.GATHER).key


def test_residuals_are_rounded_differently_by_rank_step_bucket_and_phase():
    """And alike in a run that is repeated or resumed, whatever the names are."""
    cases = list(itertools.product((0, 1), (4, 5), (0, 1), (Phase.SCATTER, Phase.GATHER)))
    first, again = ([messages_of(*case, names).dither(phase) for *case, phase in cases] for names in ("ab", "cd"))
    assert first == again and len(set(first)) == len(cases)


def messages_of(rank: int, step: int, number: int = 0, names: str = "ab") -> Messages:
    """Of the first or the second bucket."""
    buckets, _ = make_buckets(
        [(name, torch.zeros(640)) for name in names],
        **{"min_numel": 1, "bucket_bytes": 2560, "block_size": 64, "rank": rank, "world_size": 3},
        error_feedback=True,
    )
    assert len(buckets) == 2
    return Messages(buckets[number], 4, step, True)


def test_rounding_to_nearest_has_no_randomness():
    world = stochastic(2, rounding="nearest")
    assert len({payload for rank in range(2) for payload in payloads(world, "pair", rank)}) == 1
