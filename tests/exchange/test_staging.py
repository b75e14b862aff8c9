"""Messages of a GPU on their way through main memory, with simulated streams. test_streams.py has more."""

import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from races import Race, SimulatedCuda
from staged import MachinesWithMessages
from test_streams import StandIn, ThreadOfItsOwn, nothing, on_machines

from hvd_dyncomp.transport import collectives, staging


def test_no_message_is_sent_before_it_has_been_copied(monkeypatch):
    simulated = SimulatedCuda.__init__

    def impatient(self, machine, patch):
        simulated(self, machine, patch)
        patch.setattr(torch.cuda.Event, "synchronize", nothing)

    monkeypatch.setattr(SimulatedCuda, "__init__", impatient)
    with pytest.raises(Race, match="send in .*staging of outgoing.* may run before"):
        on_machines(monkeypatch, 2, (), 4, world=MachinesWithMessages)


def test_a_shard_of_the_rank_itself_is_kept_until_it_has_been_copied(monkeypatch):
    def careless(parts, like):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "record_stream", nothing)
            return staging.joined(parts, like)

    monkeypatch.setattr(collectives, "joined", careless)
    with pytest.raises(Race, match="memory of .*outgoing.* is used in incoming, and was not kept"):
        on_machines(monkeypatch, 3, (), 4, world=MachinesWithMessages)


def test_closing_has_an_end_though_a_copy_has_none(monkeypatch):
    never = threading.Event()
    stuck = SimpleNamespace(record=nothing, synchronize=never.wait)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: stuck)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(staging, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(staging, "pinned", lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    posted = []
    here = staging.Staging(lambda *message: posted.append(message), nothing)
    here.post(1, b"key", torch.ones(4, dtype=torch.uint8), nothing)
    began = time.monotonic()
    here.close(0.2)
    assert time.monotonic() - began < 5 and not posted
    never.set()
    here.close()
    assert len(posted) == 1


def test_who_waits_for_a_copy_uses_no_other_device(monkeypatch):
    thread, body = ThreadOfItsOwn(monkeypatch, 3), SimpleNamespace(device=torch.device("cuda", 3), numel=lambda: 4)
    copy, posted, waited_on, waiting = SimpleNamespace(copy_=nothing), [], [], []

    class Event:
        def __init__(self, blocking: bool) -> None:
            pass

        def record(self, stream: StandIn) -> None:
            assert stream.device.index == 3

        def synchronize(self) -> None:
            waited_on.append(thread.stream().device.index)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(staging, "on_gpu", lambda tensor: True)
    monkeypatch.setattr(staging, "pinned", lambda nbytes: copy)
    monkeypatch.setattr(staging, "_Copies", lambda: SimpleNamespace(submit=waiting.append))
    here = staging.Staging(lambda *message: posted.append(message), nothing)
    here.post(1, b"key", body, nothing)
    [hand_on] = waiting
    hand_on()
    monkeypatch.setattr(staging, "pinned", lambda nbytes: waited_on.append(thread.stream().device.index) or copy)
    assert here.room(4) is copy
    assert waited_on == [3, 3] and posted == [(1, b"key", copy, nothing)] and thread.mine == {3}
