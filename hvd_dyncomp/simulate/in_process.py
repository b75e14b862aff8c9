"""N ranks in one process, for simulations and for tests. A scheduler decides which rank runs and what has arrived.

    world = World(3)
    for transport in world.transports:           # ranks that never wait for each other, one after the other
        ...
    results = world.run(lambda transport: ...)   # or a program per rank, with everything that Horovod allows

`run` gives every rank a thread; one thread runs at a time. At every call of its transport a rank may lose its turn.
`choose` decides which rank runs next, whether a polling rank sees a complete collective yet, and when background work
runs. No clock is read. Runs with the same choices are the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from hvd_dyncomp.errors import LockstepError
from hvd_dyncomp.simulate.rendezvous import Collective, Mismatch
from hvd_dyncomp.transport.base import Transport, of_all

Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """All ranks that still run wait for something that will never arrive. The message says which waits for what."""


class Ended(LockstepError):
    """The program of a rank that is waited for has ended with an error."""


class InProcessTransport(Transport):
    """One rank's end of a `World`."""

    def __init__(self, world: World, rank: int) -> None:
        self._world, self._rank = world, rank

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._world.transports)

    @property
    def host(self) -> str:
        return f"host{self._world.hosts[self._rank]}"

    @property
    def local_size(self) -> int:
        return self._world.hosts.count(self._world.hosts[self._rank])

    @property
    def shared(self) -> InProcessTransport:
        return self._world.transports[self._rank]

    def hosts(self) -> list[str]:
        return [f"host{number}" for number in self._world.hosts]

    def for_exchanges(self, phases: Mapping[str, Sequence[int]]) -> InProcessTransport:
        return InProcessTransport(self._world, self._rank)

    def alltoall(
        self,
        tensor: torch.Tensor,
        ranks: Sequence[int],
        splits: list[int],
        arriving: list[int],
        name: str,
        out: torch.Tensor | None = None,
    ) -> Collective:
        splits, arriving = of_all(self.size, ranks, splits), of_all(self.size, ranks, arriving)
        collective = self._start("alltoall", tensor.clone(), splits, name, arriving)
        if out is not None:
            collective.outs[self._rank] = out
        return collective

    def allgather(self, tensor: torch.Tensor, name: str, arriving: list[int] | None = None) -> Collective:
        copies = tensor.repeat(self.size)
        return self._start("allgather", copies, [tensor.numel()] * self.size, name, arriving)

    def sum(self, tensor: torch.Tensor, name: str) -> Collective:
        return self._start("sum", tensor, [], name)

    def _start(
        self, kind: str, tensor: torch.Tensor, splits: list[int], name: str, arriving: list[int] | None = None
    ) -> Collective:
        self._world.take_turns(self._rank)
        collective = self._world.start(self._rank, kind, tensor, splits, name, arriving)
        if tensor.is_cuda:  # who reads what was sent, or has come of it, does so in any stream
            torch.cuda.current_stream(tensor.device).synchronize()
        return collective

    def poll(self, handle: Collective) -> bool:
        self._world.take_turns(self._rank)
        return self._world.ends(handle) and self._world.has_arrived()

    def wait(self, handle: Collective) -> torch.Tensor:
        self._world.block(self._rank, handle)
        if not handle.over:
            raise self._world.why_none(handle) or Deadlock(f"nobody can go on: {handle.name}")
        if handle.error is not None:
            raise handle.error
        return handle.received[self._rank]  # type: ignore[index]  # it is over, and without an error

    def in_background(self, work: Callable[[], bool]) -> None:
        self._world.add_background(self._rank, work)


class World:
    """`size` ranks in this process.

    Args:
        size: their number.
        choices: whole numbers that decide, one after the other and from the beginning again, whatever is open; without,
            ranks go on until they have to wait, and everything that is complete has arrived.
        hosts: the number of each rank's host; without, every rank has one of its own.

    Attributes:
        transports: one a rank.
        hosts: see above.
        bytes_sent: by rank, what it has handed over for other ranks.
        bytes_leaving: by rank, so much of it as was for ranks of other hosts, in what goes from rank to rank.
        messages_sent: by rank, how many of its parts were for another rank and not empty.
        ended: by rank, the error that has ended its program.
    """

    def __init__(self, size: int, choices: Sequence[int] = (), hosts: Sequence[int] = ()) -> None:
        self.transports = [InProcessTransport(self, rank) for rank in range(size)]
        self.hosts = list(hosts) or list(range(size))
        self.forget_counts()
        self.ended: dict[int, BaseException] = {}
        self._choices, self._next = list(choices), 0
        self._open: dict[str, Collective] = {}
        self._background: list[list[Callable[[], bool]]] = [[] for _ in range(size)]
        self._in_background = False
        self._broken: Exception | None = None
        self._turn = [threading.Semaphore(0) for _ in range(size)]
        self._started = 0
        self._waits: dict[int, Collective] = {}
        self._running: set[int] = set()
        self._patient = False
        self._dead = ""

    def forget_counts(self) -> None:
        """Count bytes and messages from now on."""
        size = len(self.transports)
        self.bytes_sent, self.bytes_leaving, self.messages_sent = [0] * size, [0] * size, [0] * size

    def run(self, program: Callable[[InProcessTransport], Result]) -> list[Result]:
        """Runs `program(transport)` on every rank, all at once; returns what they returned, in rank order.

        Raises:
            Deadlock: no rank can go on.
            RuntimeError: work in the background has raised an error, which it must not.
            Exception: what the first rank raised that raised anything.
        """
        results: list[Any] = [None] * len(self.transports)
        errors = self.ended
        self._running = set(range(len(self.transports)))
        over = threading.Event()

        def play(rank: int) -> None:
            self._turn[rank].acquire()
            try:
                results[rank] = program(self.transports[rank])
            except BaseException as error:  # noqa: BLE001  # raised again by run
                errors[rank] = error
            self._running.discard(rank)
            if self._running:
                self._pass_on(None)
            else:
                over.set()

        threads = [threading.Thread(target=play, args=(rank,), daemon=True) for rank in self._running]
        for thread in threads:
            thread.start()
        self._turn[0].release()
        over.wait()
        for thread in threads:
            thread.join()
        if self._broken is not None:
            raise RuntimeError("work in the background has raised an error") from self._broken
        for rank in sorted(errors, key=lambda rank: (isinstance(errors[rank], Deadlock | Ended), rank)):
            raise errors[rank]
        return results

    def why_none(self, collective: Collective) -> LockstepError | None:
        """Why a collective that is not over will never be; None if it may be."""
        for rank in sorted(set(self.ended) - set(collective.sent)):
            return Ended(f"{collective.name}: rank {rank} has ended with {self.ended[rank]!r}")
        return None

    def ends(self, collective: Collective) -> bool:
        """Whether `wait` returns at once, or raises."""
        return collective.over or self.why_none(collective) is not None

    def choose(self, count: int) -> int:
        """A number below `count`."""
        if not self._choices or count == 1:
            return 0
        self._next += 1
        return self._choices[(self._next - 1) % len(self._choices)] % count

    def chance(self) -> bool:
        return self.choose(2) == 0

    def has_arrived(self) -> bool:
        """Whether a rank that polls for a collective that is over sees that. In the end it does."""
        return self._patient or self.chance()

    def start(
        self, rank: int, kind: str, tensor: torch.Tensor, splits: list[int], name: str, arriving: list[int] | None
    ) -> Collective:
        collective = self._open.get(name)
        if collective is None:
            collective = self._open[name] = Collective(kind, name, len(self.transports))
        if rank in collective.sent or collective.kind != kind:
            raise Mismatch(f"rank {rank} starts {kind} {name}, which is under way as {collective.kind}")
        size, nbytes = len(self.transports), tensor.numel() * tensor.element_size()
        if kind == "sum":
            self.bytes_sent[rank] += 2 * nbytes * (size - 1) // size
        else:
            self.bytes_sent[rank] += sum(splits) - splits[rank]
            self.messages_sent[rank] += sum(count > 0 for count in splits) - (splits[rank] > 0)
            away = [other != self.hosts[rank] for other in self.hosts]
            self.bytes_leaving[rank] += sum(count for count, leaves in zip(splits, away, strict=True) if leaves)
        self._started += 1
        collective.add(rank, tensor, splits, arriving)
        if collective.over:
            del self._open[name]
        return collective

    def add_background(self, rank: int, work: Callable[[], bool]) -> None:
        if len(self.transports) > 1:  # alone, a rank waits for nothing, and nobody would take it out again
            self._background[rank].append(work)

    def take_turns(self, rank: int) -> None:
        """Lets another rank go on, perhaps."""
        if rank in self._running and not self._in_background and not self.chance():
            self._pass_on(rank)

    def block(self, rank: int, collective: Collective) -> None:
        """Returns when `collective` ends, and what this rank has received is where it is to be."""
        while not self.ends(collective):
            self._wait_for_a_turn(rank, collective)
        collective.place(rank)

    def _wait_for_a_turn(self, rank: int, collective: Collective) -> None:
        if rank not in self._running or self._in_background:
            raise Deadlock(f"rank {rank} waits for {collective.name}, which {sorted(collective.sent)} have started")
        self._waits[rank] = collective
        self._pass_on(rank)
        self._waits.pop(rank, None)
        if self._dead:
            raise Deadlock(self._dead)

    def _pass_on(self, rank: int | None) -> None:
        """Gives the turn to a rank that can go on; returns when `rank` (None: which has ended) has it again."""
        chosen = self._who_is_next()
        if chosen == rank:
            return
        self._turn[chosen].release()
        if rank is not None:
            self._turn[rank].acquire()

    def _who_is_next(self) -> int:
        if self._choices and self.chance():
            self._work_in_background()
        while not (able := [r for r in sorted(self._running) if r not in self._waits or self.ends(self._waits[r])]):
            before = self._progress()
            self._patient = True
            self._work_in_background()
            self._patient = False
            if self._progress() == before:
                waits = [f"rank {rank} for {wait.name}" for rank, wait in sorted(self._waits.items())]
                self._dead = "nobody can go on: " + ", ".join(waits)
                return min(self._running)
        return able[self.choose(len(able))]

    def _progress(self) -> tuple[int, int]:
        return self._started, sum(map(self.ends, self._waits.values()))

    def _work_in_background(self) -> None:
        """Done by whoever has the turn, in the name of a rank or, without choices, of all."""
        self._in_background = True
        try:
            for works in self._background:
                works[:] = [work for work in list(works) if self._goes_on(work)]
        finally:
            self._in_background = False

    def _goes_on(self, work: Callable[[], bool]) -> bool:
        try:
            return not work()
        except Exception as error:  # noqa: BLE001  # raised again by run: whose turn it is has nothing to do with it
            self._broken = self._broken or error
            return False
