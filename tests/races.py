"""A GPU simulated on the CPU: which operator runs in which stream, what comes before what, and who races whom.

Operators run at once, but are held to be ordered only as the streams they are queued in order them: by vector clocks, a
component for each stream. An operator that reads what another one writes, with neither before the other, is a race; so
is reading on the host what another stream writes. Memory that was made in one stream and is used in another must
be kept for it. And in a hook nothing may wait for the device.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from simulated import RecordingWorld
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hvd_dyncomp.simulate import InProcessTransport
from hvd_dyncomp.simulate.rendezvous import Collective
from hvd_dyncomp.transport.collective_handle import CollectiveHandle

Stream = tuple[int, str]  # of a rank
Clock = dict[Stream, int]
HOST, NCCL = "host", "nccl"
SYNCHRONIZING = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::item"}


class Race(BaseException):  # so that nothing takes it for an error of a rank's
    """Two operators that nothing orders touch the same memory, or one waits where it must not."""


class Memory:
    """What there is to know of a storage."""

    def __init__(self, storage: torch.UntypedStorage, made_in: str) -> None:
        self.storage, self.made_in = storage, made_in  # kept alive, so that its address is no other's
        self.written: tuple[Stream, int, str] | None = None
        self.read: dict[Stream, tuple[int, str]] = {}
        self.kept = self.used_elsewhere = False
        self.on_host = False


class Machine:
    """The GPUs of all ranks of a world."""

    def __init__(self) -> None:
        self._here = threading.local()
        self._clocks: defaultdict[Stream, Clock] = defaultdict(dict)
        self.asked: set[Stream] = set()  # streams that were asked whether all is done, and will say so next time
        self._memory: dict[int, Memory] = {}

    @contextmanager
    def place(self, **changes: Any) -> Iterator[None]:
        """Sets `rank`, `stream`, `hook` (whether this is one) or `off` for what this thread does within."""
        before = dict(self._here.__dict__)
        self._here.__dict__.update(changes)
        try:
            yield
        finally:
            self._here.__dict__.clear()
            self._here.__dict__.update(before)

    @property
    def rank(self) -> int:
        return self._here.rank

    @property
    def stream(self) -> Stream:
        return self._here.rank, self._here.stream

    def wait(self, later: Stream, earlier: Stream) -> None:
        """What is queued in one stream from now on runs after what is queued in another by now."""
        self._merge(later, dict(self._clocks[earlier]))

    def host_waits(self, clock: Clock) -> None:
        self._merge((self.rank, HOST), clock)

    def wait_until(self, clock: Clock) -> None:
        """What this thread does from now on comes after that."""
        self._merge(self.stream, clock)

    def clock(self, stream: Stream) -> Clock:
        return dict(self._clocks[stream])

    def of(self, tensor: torch.Tensor, made_in: str = "") -> Memory:
        storage = tensor.untyped_storage()
        return self._memory.setdefault(storage._cdata, Memory(storage, made_in))

    def on_host(self, tensor: torch.Tensor) -> None:
        """This one is no memory of the device's."""
        self.of(tensor).on_host = True

    def keep(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Memory of this one is not used anew before all is done that is queued in a stream when it is freed."""
        self.of(tensor).kept |= stream[1] == "incoming"

    def sends(self, tensor: torch.Tensor, received: torch.Tensor) -> Clock:
        """NCCL does, in a stream of its own, after what this thread has queued; returns when it has."""
        nccl = self.rank, NCCL
        self.wait(nccl, self.stream)
        self._touch(nccl, [tensor], [received], "a collective")
        return self.clock(nccl)

    def arrived(self, tensor: torch.Tensor) -> None:
        """What a collective has written, before the program was told of it."""
        memory = self._memory[tensor.untyped_storage()._cdata] = Memory(tensor.untyped_storage(), "transport")
        memory.written, memory.read = None, {}

    def unkept(self) -> list[Memory]:
        return [
            memory
            for memory in self._memory.values()
            if memory.used_elsewhere and memory.made_in in ("outgoing", "transport") and not memory.kept
        ]

    def ran(self, func: Any, args: tuple, kwargs: dict, result: Any) -> None:
        """An operator was queued."""
        if getattr(self._here, "off", True):
            return
        schema = func._schema
        inputs = [tensor for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, torch.Tensor)]
        if inputs and all(self.of(tensor).on_host for tensor in inputs):
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    self.of(tensor).on_host = True
            return
        if schema.name in SYNCHRONIZING:
            if self._here.hook:
                raise Race(f"{schema.name} in a hook waits for the device")
            self._touch(self.stream, inputs, [], schema.name)
            self.host_waits(self.clock(self.stream))
            return
        if any(value.alias_info and not value.alias_info.is_write for value in schema.returns):
            return  # a view
        reads, writes = [], []
        for i, argument in enumerate(schema.arguments):
            value = kwargs.get(argument.name) if i >= len(args) else args[i]
            into = writes if argument.alias_info and argument.alias_info.is_write else reads
            into += tree_leaves(value)
        self._touch(self.stream, reads, [*writes, *tree_leaves(result)], schema.name)

    def copied(self, tensor: torch.Tensor) -> None:
        """To the host, which waits for it. On a CPU that is no operator."""
        if getattr(self._here, "off", True) or self.of(tensor).on_host:
            return
        if self._here.hook:
            raise Race("a copy to the host in a hook waits for the device")
        self._touch(self.stream, [tensor], [], "cpu")
        self.host_waits(self.clock(self.stream))

    def _touch(self, stream: Stream, reads: list, writes: list, what: str) -> None:
        self._merge(stream, self._clocks[self.rank, HOST])
        clock = self._clocks[stream]
        clock[stream] = count = clock.get(stream, 0) + 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                if isinstance(tensor, torch.Tensor):
                    self._access(self.of(tensor, stream[1]), stream, clock, count, what, writing)

    @staticmethod
    def _access(memory: Memory, stream: Stream, clock: Clock, count: int, what: str, writing: bool) -> None:
        others = [memory.written] if memory.written else []
        if writing:
            others += [(other, *seen) for other, seen in memory.read.items()]
        for other, when, did in others:
            if clock.get(other, 0) < when:
                raise Race(f"{what} in {stream} may run before {did} in {other}")
        if writing:
            memory.written, memory.read = (stream, count, what), {}
        else:
            memory.read[stream] = count, what
        memory.used_elsewhere |= stream[1] in ("incoming", NCCL)

    def _merge(self, stream: Stream, other: Clock) -> None:
        clock = self._clocks[stream]
        for key, count in other.items():
            clock[key] = max(clock.get(key, 0), count)


class Watched(TorchDispatchMode):
    """Tells the machine of every operator of a thread."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self._machine.ran(func, args, kwargs or {}, result)
        return result


class SimulatedCuda:
    """What `torch.cuda` has of streams, for the machine; `tensor.record_stream` and `tensor.cpu` as well."""

    def __init__(self, machine: Machine, monkeypatch) -> None:
        cuda = self

        class Stream:
            def __init__(self, device: torch.device, priority: int) -> None:
                # The first that a rank makes is for what goes out.
                self.place = (machine.rank, "incoming" if machine.rank in cuda.made else "outgoing")
                cuda.made.add(machine.rank)

            def wait_stream(self, other: Stream) -> None:
                machine.wait(self.place, other.place)

            def query(self) -> bool:
                """Whether all is done: not at the first question."""
                machine.asked ^= {self.place}
                if self.place in machine.asked:
                    return False
                machine.host_waits(machine.clock(self.place))
                return True

        class Current(Stream):
            def __init__(self, device: torch.device) -> None:
                self.place = machine.stream

            def __eq__(self, other) -> bool:
                return self.place == other.place

            def __hash__(self) -> int:
                return hash(self.place)

        class Event:
            """Of a clock, which no time passes on."""

            def __init__(self, enable_timing: bool = False) -> None: ...

            def record(self, stream: Stream) -> None: ...

            def synchronize(self) -> None: ...

            def elapsed_time(self, other: Event) -> float:
                return 0.0

        self.made: set[int] = set()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "current_stream", Current)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: machine.place(stream=stream.place[1]))
        monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: machine.copied(tensor) or tensor)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: machine.keep(tensor, stream.place))


class WorldOfMachines(RecordingWorld):
    """Ranks with a simulated GPU each. What carries the bytes reads and writes as Horovod does: between two events."""

    def __init__(self, machine: Machine, size: int, choices=(), hosts=()) -> None:
        super().__init__(size, choices, hosts)
        self.machine = machine
        self._handed_over: dict[tuple[int, int], Clock] = {}

    def add_background(self, rank, work):
        def there() -> bool:  # in a stream of its own
            with self.machine.place(rank=rank, stream="background", hook=False, off=False):
                return work()

        super().add_background(rank, there)

    def start(self, rank, kind, tensor, splits, name, arriving):
        clock = self.machine.clock(self.machine.stream)
        with self.machine.place(off=True):
            collective = super().start(rank, kind, tensor, splits, name, arriving)
        if kind == "sum":  # at levels below 32: handshakes
            self.machine.on_host(tensor)
        self._handed_over[rank, id(collective)] = clock
        return collective

    def block(self, rank, collective):
        with self.machine.place(off=True):
            super().block(rank, collective)
        self.machine.host_waits(self._handed_over[rank, id(collective)])
        if collective.received is not None and collective.kind != "sum" and rank not in collective.outs:
            self.machine.arrived(collective.received[rank])


class InOrderTransport(InProcessTransport):
    """One rank's end of a `WorldInOrder`."""

    in_order = True

    def alltoall(self, tensor, ranks, splits, arriving, name, out=None):
        works = CollectiveHandle(name, tensor, lambda: None, in_order=True)
        works.start(lambda: self._queued(tensor, ranks, splits, arriving, name, out))
        return works

    def allgather(self, tensor, name, arriving=None):
        if arriving is None:  # words, on the host
            return super().allgather(tensor, name)
        return self.alltoall(tensor.repeat(self.size), range(self.size), [len(tensor)] * self.size, arriving, name)

    def _queued(self, tensor, ranks, splits, arriving, name, out):
        received = tensor.new_empty(sum(arriving)) if out is None else out
        end = self._world.machine.sends(tensor, received)
        self._world.order[self.rank].append(name)
        with self._world.machine.place(off=True):
            collective = super().alltoall(tensor, ranks, splits, arriving, name)
        return [_Work(self._world, self.rank, collective, received, end)], received

    def poll(self, handle):
        return handle.over if isinstance(handle, CollectiveHandle) else super().poll(handle)

    def wait(self, handle):
        return handle.result() if isinstance(handle, CollectiveHandle) else super().wait(handle)


class _Work(NamedTuple):
    """A collective in the stream of NCCL's."""

    world: WorldInOrder
    rank: int
    collective: Collective
    received: torch.Tensor
    end: Clock

    def wait(self) -> None:
        """The current stream waits. (So does this thread: for the bytes, since operators run at once.)"""
        self.world.block(self.rank, self.collective)
        with self.world.machine.place(off=True):
            self.received.copy_(self.collective.received[self.rank])
        self.world.machine.wait_until(self.end)


class WorldInOrder(WorldOfMachines):
    """Ranks with a simulated GPU each, whose messages travel as by NCCL: queued, and matched by their order.

    Attributes:
        order: by rank, the names of what it has sent.
    """

    transport = InOrderTransport

    def __init__(self, machine: Machine, size: int, choices=(), hosts=()) -> None:
        super().__init__(machine, size, choices, hosts)
        self.transports = [self.transport(self, rank) for rank in range(size)]
        self.order: list[list[str]] = [[] for _ in range(size)]

    def block(self, rank, collective):
        RecordingWorld.block(self, rank, collective)  # nobody waits for a GPU

    def run(self, program):
        results = super().run(program)
        assert all(names == self.order[0] for names in self.order), "NCCL would mistake one collective for another"
        return results
