"""A `World` whose collectives are made of messages between two ranks, as over a process group."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch

from hvd_dyncomp.transport.collectives import Collective, Collectives
from hvd_dyncomp.transport.in_process import InProcessTransport, World


class MessageTransport(InProcessTransport):
    """One rank's end of a `MessageWorld`."""

    def __init__(self, world: MessageWorld, rank: int) -> None:
        super().__init__(world, rank)
        size = len(world.hosts)
        self.collectives = Collectives(rank, size, lambda to, *message: world.post(rank, to, *message))

    def _start(self, kind: str, tensor: torch.Tensor, splits: list[int], name: str) -> Collective:
        self._world.take_turns(self._rank)
        if kind == "alltoall":
            return self.collectives.alltoall(tensor, splits, name)
        return getattr(self.collectives, kind)(tensor, name)

    def wait(self, handle: Collective) -> torch.Tensor:
        self._world.block(self._rank, handle)
        return handle.result()


class MessageWorld(World):
    """Between two ranks, messages arrive in the order of sending; of what two ranks send, anything may come first.

    A message is read from its sender's memory when it arrives.
    """

    def __init__(self, size: int, choices: Sequence[int] = (), hosts: Sequence[int] = ()) -> None:
        super().__init__(size, choices, hosts)
        self._on_the_way: dict[tuple[int, int], deque] = {}
        self._posted = self._delivered = 0
        self.transports = [MessageTransport(self, rank) for rank in range(size)]

    def post(self, rank: int, to: int, key: bytes, body: torch.Tensor, sent: Callable[[], None]) -> None:
        self._on_the_way.setdefault((rank, to), deque()).append((key, body, sent))
        self._posted += 1

    def take_turns(self, rank: int) -> None:
        self._deliver()
        super().take_turns(rank)

    def _work_in_background(self) -> None:
        self._deliver()
        super()._work_in_background()

    def _deliver(self) -> None:
        while self._on_the_way and (self._patient or self.chance()):
            rank, to = pair = sorted(self._on_the_way)[self.choose(len(self._on_the_way))]
            key, body, sent = self._on_the_way[pair].popleft()
            if not self._on_the_way[pair]:
                del self._on_the_way[pair]
            self._delivered += 1
            self.arrived(rank, to, key, body)
            sent()

    def arrived(self, rank: int, to: int, key: bytes, body: torch.Tensor) -> None:
        self.transports[to].collectives.arrived(rank, key, body.clone())

    def _progress(self) -> tuple[int, ...]:
        return (*super()._progress(), self._posted, self._delivered)
