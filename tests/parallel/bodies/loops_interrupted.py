"""What a signal handler raises between two calls of a step, on one rank, and a loop that goes on as if nothing were.

Stock Horovod survives it: what was not handed in within backward is handed in by `synchronize`. From there on it does
not: it cannot be asked twice for what it has reduced. So nothing is interrupted then.
"""

from __future__ import annotations

import random
import signal

import horovod.torch as hvd
import pytest
import torch
from interruption import Interrupted, Interruption
from problem import Linear, distribute, ours, same_on_all_ranks, weights

pytestmark = pytest.mark.timeout(120, method="thread")
RETURNED = ("decompress",)


@pytest.fixture
def handler():
    """Of an alarm: raises, but not in Horovod's own code."""

    def raise_it(number, frame):
        # The second alarm may come before this has returned to Horovod's code after the first.
        if frame.f_code is raise_it.__code__ or innermost(frame) == "horovod":
            signal.setitimer(signal.ITIMER_REAL, 2e-5)
        else:
            raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_it)
    yield raise_it
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert signal.getsignal(signal.SIGALRM) is raise_it, "it was not put back"
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("bits", [4, 32])
def test_at_every_call(bits, rank, size, handler):
    model = Linear()
    optimizer = distribute(model, ours(bits, bucket_bytes=8192), prefix=f"interrupted.{bits}.")
    number = calls = 0
    while number <= calls:  # in each step at the next call
        here = Interruption(
            number if rank == size - 1 else -1,
            lambda: signal.raise_signal(signal.SIGALRM),
            lambda: signal.getsignal(signal.SIGALRM) is not handler,
            RETURNED,
        )
        optimizer.zero_grad()
        loss = model(number)
        here.hits(loss.backward)
        if here.hits(optimizer.synchronize):
            optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        calls = hvd.broadcast_object(here.calls, root_rank=size - 1, name="interrupted.calls")
        number += 1
    assert number > 30
    assert same_on_all_ranks(weights(model), f"interrupted.{bits}")
    assert all(torch.isfinite(value).all() for value in weights(model))


def innermost(frame) -> str:
    """Whose code it was that a signal has interrupted: the package's name, or "" if it was this file's."""
    while frame is not None and frame.f_code.co_filename != __file__:
        for package in ("hvd_dyncomp", "horovod"):
            if f"/{package}/" in frame.f_code.co_filename:
                return package
        frame = frame.f_back
    return ""


@pytest.mark.usefixtures("handler")
@pytest.mark.parametrize("bits", [1, 4])
def test_by_signals_at_any_moment_of_backward(bits, rank):
    """On every rank, at moments of its own. Not in Horovod's own code, which may then hand in a gradient twice."""
    model = Linear((50_000, 20_000, 2048, 10))
    optimizer = distribute(model, ours(bits, bucket_bytes=65536), prefix=f"signalled.{bits}.")
    moments, hit = random.Random(rank), 0

    for step in range(40):
        optimizer.zero_grad()
        loss = model(step)
        try:
            signal.setitimer(signal.ITIMER_REAL, moments.uniform(1e-5, 3e-3))
            loss.backward()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except Interrupted:
            hit += 1
        optimizer.step()
    assert hit > 0
    assert same_on_all_ranks(weights(model), f"signalled.{bits}")


@pytest.mark.parametrize("bits", [4, 32])
def test_a_rollback_between_backward_and_step(bits, request):
    """The optimizer's state is loaded, a loss is averaged, and the next batch trains."""
    model = Linear()
    optimizer = distribute(model, ours(bits, bucket_bytes=8192), prefix=f"rollback.{bits}.")
    for step in range(12):
        optimizer.zero_grad()
        loss = model(step)
        loss.backward()
        if step % 3 == 1:
            optimizer.load_state_dict(optimizer.state_dict())
            hvd.allreduce(loss.detach(), name="rollback.loss")
            continue
        optimizer.step()
    assert same_on_all_ranks(weights(model), f"rollback.{bits}")
    assert all(value.any() for value in weights(model))
