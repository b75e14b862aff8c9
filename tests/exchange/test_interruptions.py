"""What a signal handler raises, at every call within a step: nothing of the step is torn, and every rank ends it.

A handler runs in the main thread only. Here every rank has a thread for its program, which stands for that.
"""

import pytest
import torch
from interruption import Interruption
from simulated import Worker, on_ranks, places, set_level

from hvd_dyncomp.exchange import uninterrupted

SIZES = {"a": 650, "b": 200, "small": 5}
STEPS = 3
BACKGROUND = ("_work_in_background",)  # of all ranks, by whoever has the turn; in training it has a thread of its own


@pytest.fixture(autouse=True, scope="module")
def threads():
    """Who does what is not to be interrupted: one for each rank, which all live in this process."""
    for _ in range(4):
        uninterrupted.start_thread()


@pytest.fixture(autouse=True)
def interruptible(monkeypatch):
    monkeypatch.setattr(uninterrupted, "interruptible", lambda: not hasattr(uninterrupted._here, "working"))


def trained(worker: Worker, levels: list[int], at_step: int, interruption: Interruption) -> list[torch.Tensor]:
    """Goes on after an interruption as a loop does that ignores it; returns all means, of all steps."""
    means, optimizer = [], worker.optimizer
    for step in range(STEPS):
        set_level(worker.controller, levels[step])
        optimizer.zero_grad()
        here = interruption if step == at_step and worker.transport.rank == 0 else Interruption(-1, BACKGROUND)
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
        interruption = Interruption(number, BACKGROUND)
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
