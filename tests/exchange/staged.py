"""Simulated GPUs whose messages leave from main memory, as over a process group."""

from __future__ import annotations

import functools
from collections import deque

import torch
from by_messages import MessageTransport, MessageWorld
from races import BackgroundOfMachines, Clock, Machine, Stream

from hvd_dyncomp.transport import staging
from hvd_dyncomp.transport.collectives import Collectives
from hvd_dyncomp.transport.staging import Staging


class MachineTransport(MessageTransport):
    """One rank's end of a `MachinesWithMessages`."""

    def __init__(self, world: MachinesWithMessages, rank: int) -> None:
        super().__init__(world, rank)
        post = functools.partial(world.post, rank)
        self.collectives = Collectives(rank, len(world.hosts), Staging(post, world.broken).post)

    def _start(self, kind, tensor, splits, name):
        if kind == "sum":  # handshakes and tickets
            self._world.machine.on_host(tensor)
        collective = super()._start(kind, tensor, splits, name)
        self._world.queued[self._rank, id(collective)] = self._world.machine.clock(self._world.machine.stream)
        return collective


class MachinesWithMessages(BackgroundOfMachines, MessageWorld):
    """Ranks with a simulated GPU each, whose messages leave from main memory when they have been copied there.

    Copies of different streams are complete in any order.
    """

    def __init__(self, machine: Machine, size: int, choices=(), hosts=()) -> None:
        super().__init__(size, choices, hosts)
        self.machine = self._machine = machine
        self.queued: dict[tuple[int, int], Clock] = {}
        self.staged = 0
        self._copies: dict[Stream, deque] = {}
        self.transports = [MachineTransport(self, rank) for rank in range(size)]

    def staging(self, monkeypatch) -> None:
        """Has `hvd_dyncomp.transport.staging` use the simulated GPUs."""
        machine, world = self.machine, self

        class Waiting:
            def __init__(self) -> None:
                self._stream = machine.stream

            def submit(self, hand_on) -> None:
                world.staged += 1
                world._copies.setdefault(self._stream, deque()).append(hand_on)

        monkeypatch.setattr(staging, "on_gpu", lambda tensor: not machine.of(tensor).on_host)
        monkeypatch.setattr(staging, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
        monkeypatch.setattr(staging, "_Copies", Waiting)

    def broken(self, error: Exception) -> None:
        raise error

    def post(self, rank, to, key, body, sent):
        if not self.machine.of(body).on_host:
            self.machine.sends(body)
        super().post(rank, to, key, body, sent)

    def arrived(self, rank, to, key, body):
        with self.machine.place(off=True):
            body = body.clone()
        self.machine.on_host(body)
        super().arrived(rank, to, key, body)

    def block(self, rank, collective):
        super().block(rank, collective)
        self.machine.host_waits(self.queued[rank, id(collective)])

    def _deliver(self):
        while self._copies and (self._patient or self.chance()):
            stream = sorted(self._copies)[self.choose(len(self._copies))]
            hand_on = self._copies[stream].popleft()
            if not self._copies[stream]:
                del self._copies[stream]
            with self.machine.place(rank=stream[0], stream=f"staging of {stream[1]}", hook=False, off=False):
                hand_on()
        super()._deliver()

    def _progress(self):
        return (*super()._progress(), self.staged)
