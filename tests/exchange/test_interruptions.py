"""What a signal handler raises, at every call within a step: nothing of the step is torn, and every rank ends it.

A handler runs in the main thread only. Here every rank has a thread for its program, which stands for that.
"""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from simulated import Worker, on_ranks, places, set_level

import hvd_dyncomp
from hvd_dyncomp.exchange import uninterrupted

PACKAGE = str(Path(hvd_dyncomp.__file__).parent)
HOROVOD = str(Path(hvd_dyncomp.__file__).parent / "transport")  # which nobody interrupts
SIZES = {"a": 650, "b": 200, "small": 5}
STEPS = 3


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


class Interruption:
    """Raises at the `number`-th call of a function of the package in this thread; counts them."""

    def __init__(self, number: int) -> None:
        self.number, self.calls = number, 0

    def __enter__(self):
        sys.settrace(self._at_call)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _at_call(self, frame, event, argument):
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE) or name.startswith(HOROVOD) or in_background(frame):
            return
        self.calls += 1
        if self.calls - 1 == self.number:
            raise Interrupted(frame.f_code.co_qualname)


def in_background(frame) -> bool:
    """In a `World` whoever has the turn does this, of all ranks; in training it has a thread of its own."""
    while frame is not None:
        if frame.f_code.co_name == "_work_in_background":
            return True
        frame = frame.f_back
    return False


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    with ThreadPoolExecutor(thread_name_prefix="of the ranks") as pool:
        monkeypatch.setattr(uninterrupted, "_pool", pool)
        monkeypatch.setattr(
            uninterrupted, "interruptible", lambda: not threading.current_thread().name.startswith("of the ranks")
        )
        yield


def trained(worker: Worker, levels: list[int], at_step: int, interruption: Interruption) -> list[torch.Tensor]:
    """Goes on after an interruption as a loop does that ignores it; returns all means, of all steps."""
    means, optimizer = [], worker.optimizer
    for step in range(STEPS):
        set_level(worker.controller, levels[step])
        optimizer.zero_grad()
        here = interruption if step == at_step and worker.transport.rank == 0 else Interruption(-1)
        for name, gradient in worker.noise(step).items():
            attempt(here, lambda name=name, gradient=gradient: optimizer.backward(worker.parameters[name], gradient))
        if attempt(here, optimizer.synchronize):
            optimizer.synchronize()
        means += [p.grad.clone() for p in worker.parameters.values()]
        optimizer._synchronized = False
    return means


def attempt(interruption: Interruption, work) -> bool:
    """Whether it was interrupted."""
    try:
        with interruption:
            work()
    except Interrupted:
        return True
    return False


@places("2", "3", "2x2")
@pytest.mark.parametrize("levels", [[4, 4, 4], [4, 32, 4]], ids=["compressed", "released"])
@pytest.mark.parametrize("at_step", [0, 1], ids=["first", "later"])
def test_at_every_call(ranks, hosts, levels, at_step):
    def run(number: int):
        interruption = Interruption(number)
        seen, _ = on_ranks(
            ranks, lambda worker: trained(worker, levels, at_step, interruption), SIZES, 4, hosts=hosts, bucket_bytes=2000
        )
        return seen, interruption.calls

    expected, calls = run(-1)
    assert calls > 50
    for number in range(calls):
        seen, reached = run(number)
        assert reached > number
        for rank, means in enumerate(seen):
            assert all(map(torch.equal, means, expected[rank])), f"interrupted at call {number}"
