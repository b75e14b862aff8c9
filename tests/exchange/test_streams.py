"""On a GPU: no two operators race, whoever is fast, and no hook waits for the device. With simulated streams."""

import threading
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from races import Machine, Race, SimulatedCuda, Watched, WorldInOrder, WorldOfMachines
from simulated import PLACES, Worker, noise, on_ranks, places

from hvd_dyncomp import LockstepError, kernels
from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.streams import CudaStreams, Streams, streams_of

SIZES = {"a": 300, "b": 5, "c": 200, "d": 130}
STREAMS = ("autograd", "autograd of a branch")
STEPS = 3


def trained(worker: Worker, machine: Machine | None = None, *, resized: bool = False) -> dict[str, torch.Tensor]:
    """Some steps; backward uses two streams, each after what the program has queued, as autograd has it.

    Hooks of the first step may wait for the device if what is owed is divided anew in them (`resized`).
    """
    for step in range(STEPS):
        backward(worker, step, machine, hook=step > 0 or not resized)
        worker.optimizer.step()
    trained = {name: p.detach().clone() for name, p in worker.parameters.items()}
    if machine is not None:  # what is owed is read with a step in flight
        backward(worker, STEPS, machine, hook=True)
        worker.quantizer.sync()
        worker.optimizer.give_up()
    return trained


def backward(worker: Worker, step: int, machine: Machine | None, hook: bool) -> None:
    rank = worker.transport.rank
    worker.optimizer.zero_grad()
    for i, (name, size) in enumerate(reversed(SIZES.items())):
        gradient = noise(name, size, rank, step)
        if machine is None:
            worker.optimizer.backward(worker.parameters[name], gradient)
            continue
        stream = STREAMS[i % 2]
        machine.wait((rank, stream), machine.stream)
        with machine.place(stream=stream, hook=hook):
            worker.optimizer.backward(worker.parameters[name], gradient)
    if machine is not None:
        for stream in STREAMS:
            machine.wait(machine.stream, (rank, stream))


def on_machines(
    monkeypatch, ranks, hosts, bits, choices=(), streams=CudaStreams, states=None, world=WorldOfMachines, **arguments
):
    """Runs `trained` on every rank with a simulated GPU, after loading a state; returns what the ranks returned."""
    machine = Machine()
    world = world(machine, ranks, choices, hosts)
    made: dict[int, Streams] = {}
    with monkeypatch.context() as patch:
        SimulatedCuda(machine, patch)

        def own_streams(device: torch.device) -> Streams:
            if machine.rank not in made:
                made[machine.rank] = streams(device)
            return made[machine.rank]

        for user in ("buckets", "residuals"):
            patch.setattr(f"hvd_dyncomp.exchange.{user}.streams_of", own_streams)
        patch.setattr(kernels, "backends", {})  # operators of torch's, which can be watched

        def program(transport):
            with Watched(machine), machine.place(rank=transport.rank, stream="program", hook=False, off=False):
                worker = Worker(transport, SIZES, bits, bucket_bytes=1000, **arguments)
                if states is not None:
                    worker.quantizer.load_state_dict(states[transport.rank])
                found = trained(worker, machine, resized=states is not None)
                return found

        results = world.run(program)
    if lost := machine.unkept():
        raise Race(f"memory of {[memory.made_in for memory in lost]} is used in incoming, and was not kept for it")
    return results


def plain(ranks, hosts, bits, program=trained, **arguments):
    return on_ranks(ranks, program, SIZES, bits, hosts=hosts, bucket_bytes=1000, **arguments)[0]


def states_of(ranks):
    """Of quantizers that have trained, each on a host of its own."""
    return plain(ranks, (), 4, lambda worker: trained(worker) and worker.quantizer.state_dict())


WORLDS = pytest.mark.parametrize("world", [WorldOfMachines, WorldInOrder])


def assert_nothing_races(monkeypatch, ranks, hosts, bits, world=WorldOfMachines, **arguments):
    """And the results are those of a CPU."""
    expected = plain(ranks, hosts, bits, **arguments)
    found = on_machines(monkeypatch, ranks, hosts, bits, world=world, **arguments)
    for mine, theirs in zip(found, expected, strict=True):
        for name in SIZES:
            assert torch.equal(mine[name], theirs[name]), name


@places("2", "3", "2x2", "3x2")
@pytest.mark.parametrize(
    ("bits", "arguments"),
    [(4, {}), (0.25, {}), (1, {"min_numel": 300}), (4, {"error_feedback": False}), (2, {})],
    ids=str,
)
def test_nothing_races(monkeypatch, ranks, hosts, bits, arguments):
    assert_nothing_races(monkeypatch, ranks, hosts, bits, **arguments)


@places("2", "3", "2x2")
@pytest.mark.parametrize("bits", [0.25, 4])
def test_nothing_races_with_nccl(monkeypatch, ranks, hosts, bits):
    assert_nothing_races(monkeypatch, ranks, hosts, bits, world=WorldInOrder)


@WORLDS
@places("2", "2x2")
def test_nothing_races_when_residuals_are_divided_anew(monkeypatch, ranks, hosts, world):
    on_machines(monkeypatch, ranks, hosts, 4, states=states_of(ranks), world=world)


@pytest.mark.thorough
@WORLDS
@settings(max_examples=10, deadline=None)
@given(choices=st.lists(st.integers(0, 5), min_size=1, max_size=40), where=st.sampled_from(sorted(PLACES)))
def test_nothing_races_whoever_is_fast(world, choices, where):
    ranks, hosts = PLACES[where]
    with pytest.MonkeyPatch.context() as monkeypatch:
        on_machines(monkeypatch, ranks, hosts, 4, choices, world=world)


def nothing(*args, **kwargs) -> None:
    pass


def without_origins(self, origins):
    return torch.cuda.stream(self._outgoing)


@pytest.mark.parametrize(
    ("name", "without"),
    [("outgoing", without_origins), ("synchronize", nothing), ("keep", nothing), ("catch_up", nothing)],
)
def test_each_part_is_needed(monkeypatch, name, without):
    """Also says that the simulation would find a race."""
    streams = type("Broken", (CudaStreams,), {name: without})
    with pytest.raises(Race):
        for ranks, hosts in (PLACES["2"], PLACES["2x2"]):
            on_machines(monkeypatch, ranks, hosts, 4, streams=streams, states=states_of(ranks))


def no_memory_kept(self):
    for work in self._works:
        work.wait()
    return self._result


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("races.Machine.wait_until", nothing),
        ("hvd_dyncomp.transport.collective_handle.CollectiveHandle.result", no_memory_kept),
    ],
)
def test_each_part_is_needed_with_nccl(monkeypatch, name, without):
    """The current stream waits for what arrives; what was sent is not used anew before."""
    monkeypatch.setattr(name, without)
    with pytest.raises(Race):
        on_machines(monkeypatch, *PLACES["3"], 4, world=WorldInOrder)


@pytest.mark.parametrize("where", ["2", "3"])
def test_what_differs_is_said_at_the_end_of_the_step(monkeypatch, where):
    """Headers are read when the device has caught up: before the optimizer steps."""
    right = Messages.__init__

    def wrong(self, bucket, bits, step, transport):
        right(self, bucket, bits, step + bucket.rank, transport)

    monkeypatch.setattr(Messages, "__init__", wrong)
    with pytest.raises(LockstepError, match="bucket d: rank 1 has step 1, this rank has 0"):
        on_machines(monkeypatch, *PLACES[where], 4)


def test_a_graph_that_is_captured_is_refused_before_anything_is_sent(monkeypatch):
    """In the first gradient of a step: its replay would reduce nothing. The next step, without a graph, goes on."""
    rank = threading.local()  # each has a thread

    def capturing() -> bool:
        rank.asked += 1
        return rank.captures

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", capturing)
    # What carries the bytes waits for a GPU's.
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=nothing))

    def program(worker: Worker) -> None:
        for step in range(2):
            rank.captures, rank.asked = True, 0
            with pytest.raises(RuntimeError, match="while a CUDA graph is captured: .*make_graphed_callables"):
                worker.backward(worker.noise(step))
            worker.optimizer.give_up()
            rank.captures, rank.asked = False, 0
            worker.step(worker.noise(step))
            assert rank.asked == 1, "asked for every gradient"

    _, world = on_ranks(2, program, SIZES, 4)
    assert sum(sent.name.endswith(".handshake") for sent in world.sent) == 2 * 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@places("2", "3", "2x2")
@pytest.mark.parametrize("bits", [0.25, 1, 4, 16])
def test_a_gpu_computes_what_a_cpu_does(ranks, hosts, bits):
    for mine, theirs in zip(plain(ranks, hosts, bits, device="cuda"), plain(ranks, hosts, bits), strict=True):
        for name in SIZES:
            assert torch.equal(mine[name].cpu(), theirs[name]), name


def test_on_a_cpu_there_are_none():
    cpu = streams_of(torch.device("cpu"))
    assert cpu is streams_of(torch.device("cpu")) and type(cpu) is Streams and not cpu.late
    with cpu.outgoing([cpu.origin()]), cpu.incoming():
        cpu.keep(torch.ones(1))
        cpu.catch_up()
        cpu.synchronize()
