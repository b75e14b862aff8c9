"""What a signal handler raises, at every call within a step: nothing of the step is torn, and every rank ends it.

A handler runs in the main thread only. Here every rank has a thread for its program, which stands for that.
"""

import threading

import pytest
import torch
from interruption import Interrupted, Interruption
from simulated import Worker, on_ranks, places

from hvd_dyncomp.exchange import uninterrupted

SIZES = {"a": 650, "b": 200, "small": 5}
STEPS = 3
BACKGROUND = ("_work_in_background",)  # of all ranks, by whoever has the turn; in training it has a thread of its own


class Rank(threading.local):
    """What a thread has for signals: a rank's program has one here, in training the main thread has.

    Attributes:
        waits: how many sections keep handlers waiting.
        noted: whether one waits.
    """

    waits = 0
    noted = False


HERE = Rank()


def interrupt() -> None:
    if HERE.waits:
        HERE.noted = True
    else:
        raise Interrupted


def interrupted(number: int) -> Interruption:
    return Interruption(number, interrupt, lambda: HERE.waits > 0, BACKGROUND)


class Deferred:
    """In place of the library's, as signals reach the main thread only."""

    def __enter__(self):
        HERE.waits += 1

    def __exit__(self, *error):
        HERE.waits -= 1
        if HERE.noted and not HERE.waits:
            HERE.noted = False
            raise Interrupted


@pytest.fixture(autouse=True)
def ranks_have_signals(monkeypatch):
    monkeypatch.setattr(uninterrupted, "interruptible", lambda: True)
    monkeypatch.setattr(uninterrupted, "Deferred", Deferred)


def trained(worker: Worker, levels: list[int], at_step: int, interruption: Interruption) -> list[torch.Tensor]:
    """Goes on after an interruption as a loop does that ignores it; returns all means, of all steps."""
    means, optimizer = [], worker.optimizer
    for step in range(STEPS):
        if worker.controller.bits != levels[step]:
            worker.set_level(levels[step])
        optimizer.zero_grad()
        here = interruption if step == at_step and worker.transport.rank == 0 else interrupted(-1)
        for name, gradient in worker.noise(step).items():
            here.hits(lambda name=name, gradient=gradient: optimizer.backward(worker.parameters[name], gradient))
        if here.hits(optimizer.synchronize):
            optimizer.synchronize()
        means += [p.grad.clone() for p in worker.parameters.values()]
        optimizer._synchronized = False
    return means


@places("2", "3", "2x2")
@pytest.mark.parametrize("levels", [[4, 4, 4], [4, 32, 4]], ids=["compressed", "released"])
@pytest.mark.parametrize("at_step", [0, 1], ids=["first", "later"])
def test_at_every_call(ranks, hosts, levels, at_step):
    def run(number: int):
        interruption = interrupted(number)
        seen, _ = on_ranks(
            ranks,
            lambda worker: trained(worker, levels, at_step, interruption),
            SIZES,
            4,
            hosts=hosts,
            bucket_bytes=2000,
        )
        return seen, interruption.calls

    expected, calls = run(-1)
    assert calls > 50
    for number in range(calls):
        seen, reached = run(number)
        assert reached > number
        for rank, means in enumerate(seen):
            assert all(map(torch.equal, means, expected[rank])), f"interrupted at call {number}"
