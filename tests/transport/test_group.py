"""Some ranks of a transport talk among themselves, and the others take no notice."""

import torch
from simulated import RecordingWorld

from hvd_dyncomp.simulate import World
from hvd_dyncomp.transport.group import Group


def test_a_group_sends_the_others_nothing():
    """Ranks 1 and 4 talk, and so do 0, 2, 3; each is told what it has sent."""
    world = World(5)
    members = {0: (0, 2, 3), 1: (1, 4), 2: (0, 2, 3), 3: (0, 2, 3), 4: (1, 4)}
    groups = [Group(world.transports[rank], members[rank]) for rank in range(5)]

    def program(transport):
        group, rank = groups[transport.rank], transport.rank
        lengths = [10 * rank + other for other in group.ranks]
        message = torch.cat(
            [torch.full((n,), 16 * rank + r, dtype=torch.uint8) for n, r in zip(lengths, group.ranks, strict=True)]
        )
        arriving = [10 * other + rank for other in group.ranks]
        scattered = transport.wait(group.alltoall(message, lengths, arriving, "scatter"))
        own, arriving = torch.full((rank + 3,), rank, dtype=torch.uint8), [other + 3 for other in group.ranks]
        return scattered, transport.wait(group.allgather(own, arriving, "gather"))

    for rank, (scattered, gathered) in enumerate(world.run(program)):
        parts = [torch.full((10 * sender + rank,), 16 * sender + rank) for sender in members[rank]]
        assert torch.equal(scattered.int(), torch.cat(parts).int())
        assert torch.equal(gathered.int(), torch.cat([torch.full((s + 3,), s) for s in members[rank]]).int())
        others = [r for r in members[rank] if r != rank]
        assert groups[rank].sent_bytes == world.bytes_sent[rank] == sum(10 * rank + r + rank + 3 for r in others)


def test_a_group_of_everybody_gathers_as_the_transport_does():
    """An allgather: what Horovod does in fewer messages than an alltoall of copies."""
    world = RecordingWorld(3)

    def program(transport):
        group = Group(transport, (0, 1, 2))
        return transport.wait(group.allgather(torch.full((2,), transport.rank, dtype=torch.uint8), [2] * 3, "all"))

    assert all(got.tolist() == [0, 0, 1, 1, 2, 2] for got in world.run(program))
    assert {sent.kind for sent in world.sent} == {"allgather"}
