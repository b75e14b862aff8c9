"""A backward pass of DistributedDataParallel on a GPU: means are there for whoever waits for its futures. Simulated."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from races import Machine, Race, SimulatedCuda, Watched

from hvd_dyncomp.ddp import backward
from hvd_dyncomp.exchange.streams import CudaStreams, Streams


class Bucket:
    """One of the model's, with one gradient."""

    def __init__(self) -> None:
        self.parameter, self.memory = torch.zeros(4), torch.zeros(4)

    def buffer(self):
        return self.memory

    def gradients(self):
        return [self.memory]

    def parameters(self):
        return [self.parameter]

    def index(self):
        return 0


class Step:
    """Takes what it gets; its means are written by kernels in the stream for what comes in."""

    traffic = SimpleNamespace(seconds=0.0)
    bits = 4

    def __init__(self, machine: Machine, streams: Streams) -> None:
        self._machine, self._streams, self._taken = machine, streams, []
        self._origins = set()

    def add(self, slot, gradient) -> None:
        self._taken.append(gradient)
        self._origins.add(self._streams.origin())

    def reduce(self, place, gradients) -> None:
        for gradient in gradients.values():
            self.add(None, gradient)

    def collect(self) -> None:
        self.collected_in = self._machine.stream
        with self._streams.outgoing(self._origins):  # messages leave when they have been made
            self._machine.host_waits(self._machine.clock(self._machine.stream))
        for gradient in self._taken:
            with self._streams.incoming():
                gradient.zero_()
        self._streams.catch_up()
        for gradient in self._taken:  # as `Step` does
            gradient.mul_(1)
        self._streams.synchronize()


def simulate(machine: Machine, patch: pytest.MonkeyPatch) -> None:
    """Has a backward pass run on a simulated GPU."""

    class Future:
        def __init__(self, devices) -> None:
            assert devices == [torch.device("cpu")]  # of the simulated GPU

        def set_result(self, value) -> None:
            self.queued = machine.clock(machine.stream)

        def done(self) -> bool:
            return hasattr(self, "queued")

        def wait(self) -> None:
            machine.wait_until(self.queued)

    SimulatedCuda(machine, patch)
    patch.setattr(torch.Tensor, "is_cuda", True)
    patch.setattr(torch.futures, "Future", Future)


def a_pass(step, *, compressed: bool) -> backward.Backward:
    slots = {"it": SimpleNamespace(name="it")} if compressed else {}
    return backward.Backward(step, slots=slots, end=lambda its: its.collect())


def passed(monkeypatch, *, compressed: bool, waits: bool = True) -> None:
    """A pass of two buckets, whose means the program reads afterwards."""
    machine = Machine()
    with monkeypatch.context() as patch, Watched(machine):
        simulate(machine, patch)
        with machine.place(rank=0, stream="program", hook=False, off=False):
            here = CudaStreams(torch.device("cpu"))
            patch.setattr(backward, "streams_of", lambda device: here)
            step = Step(machine, here)
            one = a_pass(step, compressed=compressed)
            buckets = [Bucket(), Bucket()]
            for number, bucket in enumerate(buckets):
                bucket.memory += 1
                machine.wait((0, f"autograd {number}"), machine.stream)
                with machine.place(stream=f"autograd {number}", hook=True):
                    future = one.future_of(bucket)
                    one.on_bucket(bucket, {bucket.parameter: "it"})
            one.collect()
            assert step.collected_in == (0, "autograd 1"), "not a stream that nobody else uses, or device 0's"
            for future, _ in one._futures if waits else ():
                future.wait()
            for bucket in buckets:
                bucket.memory += 1


@pytest.mark.parametrize("compressed", [True, False])
def test_nothing_races(monkeypatch, compressed):
    passed(monkeypatch, compressed=compressed)


def test_whoever_waits_for_no_future_races(monkeypatch):
    """Also says that the simulation would find a race."""
    with pytest.raises(Race, match="add_ in .*program.* may run before aten::mul_ in .*autograd 1"):
        passed(monkeypatch, compressed=False, waits=False)


class Plain:
    """Streams in which nothing is queued; `broken`: entering or leaving them raises."""

    def __init__(self, broken: str = "") -> None:
        self._broken = broken

    def origin(self) -> None:
        return None

    @contextmanager
    def queued_in(self, origin):
        if self._broken == "entering":
            raise RuntimeError("CUDA error")
        yield
        if self._broken == "leaving":
            raise RuntimeError("CUDA error")


@pytest.mark.parametrize("where", ["entering", "leaving", "the future", "collecting"])
def test_an_error_anywhere_ends_the_pass(monkeypatch, where):
    """As it is after a kernel that has failed: any call may raise. The model waits for every future."""

    def failing(*args):
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(backward, "streams_of", lambda device: Plain(where))
    step = SimpleNamespace(
        add=lambda slot, gradient: None,
        bits=4,
        collect=failing if where == "collecting" else lambda: None,
        traffic=SimpleNamespace(seconds=0.0),
    )
    one, buckets = a_pass(step, compressed=True), [Bucket(), Bucket()]
    futures = [one.future_of(bucket) for bucket in buckets]
    for bucket in buckets:
        one.on_bucket(bucket, {bucket.parameter: "it"})
    if where == "the future":  # torch's is complete before it records an event, which may raise
        result = futures[0].set_result
        one._futures[0] = (SimpleNamespace(set_result=lambda value: failing(result(value)), done=futures[0].done), None)
    with pytest.raises(RuntimeError, match="CUDA error"):
        one.collect()
    one.give_up()  # as the quantizer does then
    assert all(future.done() for future in futures)
