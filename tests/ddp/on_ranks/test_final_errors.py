"""An error within a step is final on the rank that has it. The others wait as they do under DDP: here, seconds.

A rank with an error ends its process, and a launcher then ends the others (tests/ddp/test_killed.py). Here they live
on, which they may: a new model, compressed anew, works in the same processes.
"""

import gc
import re
import signal
import time
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from problem import assert_means, distributed, gradients, same_on_all_ranks

from hvd_dyncomp import ddp
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.transport import torch_distributed

pytestmark = pytest.mark.promise(
    "An error within a step is final: the rank that has it raises it, and every further step says so."
)

LIMIT = 8  # seconds, of the process group of a model that will fail
SECONDS = 30  # after which all ranks have ended


class Interrupted(BaseException):
    """As KeyboardInterrupt."""


def interrupt(*signal_and_frame):
    raise Interrupted


@pytest.fixture(autouse=True)
def all_deleted():
    """No model is left after an error, and what it had of process groups is given up without waiting for anything."""
    before = weakref.WeakSet(torch_distributed._alive)
    yield
    began = time.monotonic()
    gc.collect()
    assert time.monotonic() - began < SECONDS
    left = set(torch_distributed._alive) - set(before)
    assert all(each.shared is each for each in left), "a model's groups are kept, and the model"


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


def failing(bits: float, **arguments):
    """A model whose waits end soon, after two steps: from then on its buckets are in their final order."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    model, quantizer = distributed(bits, ddp_arguments={"process_group": group, **arguments})
    for seed in range(2 if "static_graph" not in arguments else 0):
        assert_a_step(model, seed, bits)
    return model, quantizer


def a_step(model, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(seed).backward()
    return gradients(model)


def assert_a_step(model, seed: int, bits: float = 16) -> None:
    a_step(model, seed)
    assert same_on_all_ranks(gradients(model))
    assert_means(gradients(model), model.module.mean(seed), bits)


def assert_final(model, rank: int, cause: type[BaseException], everyone: bool = False) -> None:
    """A step raises this on rank 0, and on the others the end of their waiting; further ones say why there are none.

    The model itself is usable: a step that begins says it, and not an assertion of torch's.
    """
    began = time.monotonic()
    here = rank == 0 or everyone
    with pytest.raises(cause if here else (TimeoutError, ConnectionError)) as error:
        a_step(model, 2)
    for seed in (3, 4):
        with pytest.raises(RuntimeError, match="was interrupted by .* restart all ranks from a checkpoint") as later:
            a_step(model, seed)
        assert re.match(rf"(step \d+|a step) was interrupted by {type(error.value).__name__}", str(later.value))
    assert time.monotonic() - began < SECONDS
    dist.barrier()
    assert_a_step(distributed(16)[0], 0)


@pytest.mark.parametrize(
    ("everyone", "bits", "method", "arguments"),
    [
        (False, 16, "add", {}),
        (True, 16, "add", {}),
        (True, 32, "reduce", {}),
        (True, 16, "add", {"find_unused_parameters": True}),
        (True, 16, "add", {"static_graph": True}),
        (True, 16, "collect", {}),
    ],
)
def test_an_error_in_the_middle_of_a_step(bits, method, arguments, everyone, rank, monkeypatch):
    """Of one rank, or of all, in a hook or where backward ends: after some of the gradients were taken."""
    model, _ = failing(bits, **arguments)
    real, calls = getattr(Step, method), []

    def fails(self, *given, **named):
        calls.append(given)
        if len(calls) == {"collect": 1, "reduce": 2, "add": 3}[method]:
            raise ZeroDivisionError
        return real(self, *given, **named)

    if rank == 0 or everyone:
        monkeypatch.setattr(Step, method, fails)
    assert_final(model, rank, ZeroDivisionError, everyone)


def test_a_handler_raises_while_backward_waits_for_a_late_rank(rank, handler):
    model, _ = failing(16)
    dist.barrier()
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    assert_final(model, rank, Interrupted)


def test_an_error_within_an_exchange(rank, monkeypatch):
    """In the background, too."""
    model, quantizer = failing(16)
    if rank == 0:
        monkeypatch.setattr(quantizer._plan.buckets[0].residuals, "quantized", lambda: 1 / 0)
    assert_final(model, rank, ZeroDivisionError)
    with pytest.raises(RuntimeError, match="was interrupted by"):
        quantizer.load_state_dict(quantizer.state_dict())


@pytest.mark.parametrize("call", ["step", "check_replicas"])
def test_a_rank_that_is_late_is_waited_for(call, rank):
    """However long: it is in no other call."""
    model, quantizer = distributed(16)
    a_step(model, 0)
    if rank == 1:
        time.sleep(2)
    if call == "step":
        quantizer.controller.step({})
    else:
        quantizer.check_replicas()
    if rank == 0:
        time.sleep(2)
    assert_a_step(model, 1)


def test_ranks_in_different_calls_wait_for_the_limit_of_their_group(rank):
    group = dist.new_group(timeout=timedelta(seconds=LIMIT))
    model, quantizer = distributed(16, ddp_arguments={"process_group": group})
    for seed in range(2):  # then the model has made its buckets anew, which all ranks do together
        a_step(model, seed)
    began = time.monotonic()
    with pytest.raises((TimeoutError, ConnectionError)):
        if rank == 0:
            quantizer.check_replicas()
        else:
            a_step(model, 1)
    assert time.monotonic() - began < SECONDS
    dist.barrier()
    assert ddp.transport(group).size == dist.get_world_size()
