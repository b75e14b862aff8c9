"""An error within a step, of any kind and at any call, ends training on all ranks: within seconds and in words.

Until then every rank has the same means as without it. A new model, compressed anew, works in the same processes.
"""

import contextlib
import gc
import re
import signal
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from interruption import Interrupted, Interruption
from problem import assert_means, distributed, gradients, same_on_all_ranks
from process_group import BACKEND

from hvd_dyncomp import LockstepError
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.transport import torch_distributed

pytestmark = pytest.mark.promise("An error within a step ends the run on every rank, with a message that says why.")

STRIDE = 23  # of the calls that are interrupted: each needs a model of its own
SECONDS = 15  # after which all ranks have ended
# Those that torch makes: what is raised there is torch's.
TORCHS = ("_hook", "<lambda>", "_at_end", "_raise")
BUCKETS = {"bucket_bytes": 4000}


def interrupt(*signal_and_frame):
    raise Interrupted


@pytest.fixture(autouse=True)
def all_deleted():
    """No model is left after an error, and what it had of process groups is given up without waiting for anything."""
    before = weakref.WeakSet(torch_distributed._alive)
    yield
    gc.collect()
    left = set(torch_distributed._alive) - set(before)
    assert all(each.shared is each for each in left), "a model's groups are kept, and the model"


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


def a_step(model, seed: int, *arguments) -> list[torch.Tensor]:
    model.zero_grad()
    model(seed, *arguments).backward()
    return gradients(model)


def assert_a_step(model, seed: int, bits: float = 16) -> None:
    a_step(model, seed)
    assert same_on_all_ranks(gradients(model))
    assert_means(gradients(model), model.module.mean(seed), bits)


def everyone(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def trained(model, seeds: range, here: contextlib.AbstractContextManager) -> list[list[torch.Tensor] | BaseException]:
    """What steps come to, the first of them within a context: means, or an error. All ranks end soon."""
    outcomes: list[list[torch.Tensor] | BaseException] = []
    began = time.monotonic()
    for seed in seeds:
        try:
            with here if seed == seeds[0] else contextlib.nullcontext():
                outcomes.append(a_step(model, seed))
        except (RuntimeError, ZeroDivisionError, Interrupted) as error:
            outcomes.append(error)
    assert time.monotonic() - began < SECONDS
    return outcomes


def assert_ended(outcomes: list, mean: list[torch.Tensor], cause: str, step: int, rank: int) -> None:
    """After an error of rank 0's in a step: it refuses further ones, and the others hear of it in that one or the next.

    Args:
        outcomes: of that step and two more.
        mean: of that step.
    """
    here, *later = outcomes
    if rank == 0:
        assert cause in repr(here), here
    elif isinstance(here, list):  # all that it needed was sent before
        assert all(map(torch.equal, here, mean))
        here, *later = later
    if rank > 0:
        assert isinstance(here, LockstepError), here
        assert re.match(rf"rank 0 aborted (step {step}|a step): {cause}", str(here)), here
    for error in later:
        assert re.match(rf"(step \d+|a step) was interrupted by .*{cause}", str(error)), error
        assert "restart all ranks from a checkpoint" in str(error)


@pytest.mark.parametrize("graph", ["", "find_unused_parameters", "static_graph"])
def test_a_handler_raises_while_backward_waits_for_a_late_rank(graph, rank, handler):
    model, _ = distributed(16, ddp_arguments={graph: True} if graph else {})
    steps = 2 if graph != "static_graph" else 0  # where the first pass ends otherwise than later ones
    for seed in range(steps):
        assert_a_step(model, seed)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1)
    outcomes = trained(model, range(2, 5), contextlib.nullcontext())
    assert_ended(outcomes, model.module.mean(2), "Interrupted", steps, rank)
    assert_a_step(distributed(16)[0], 0)


@pytest.mark.parametrize("kind", ["compressed", "released", "skipped", "unused"])
def test_at_any_call(kind, rank):
    """Of a hook, and of what waits where backward ends; in models of several buckets."""

    def model():
        made, _ = distributed(
            32 if kind == "released" else 16,
            ddp_arguments={"find_unused_parameters": kind == "unused"},
            skip=(lambda name, parameter: parameter.numel() == 2048) if kind == "skipped" else None,
        )
        for seed in range(2):  # from then on the buckets are in another order
            a_step(made, seed)
        return made

    expected = a_step(model(), 2)
    number, calls, errors = 0, 1, 0
    while number < calls:
        here = Interruption(number if rank == 0 else -1, interrupt, ("_in_background",), TORCHS)
        outcomes = trained(model(), range(2, 5), here)
        failed = isinstance(outcomes[2], BaseException)
        if failed:
            assert_ended(outcomes, expected, "Interrupted", 2, rank)
        else:  # nothing was interrupted
            assert all(map(torch.equal, outcomes[0], expected))
        [(calls, _), *_] = all_of_it = everyone((here.calls, failed))
        assert len({each for _, each in all_of_it}) == 1, number
        errors += failed
        number += STRIDE
    assert 0 < errors < calls


def test_a_handler_raises_where_torch_calls_the_hook():
    """It ends backward at once, and torch refuses every later forward, as after any error within backward."""
    model, quantizer = distributed(16, ddp_arguments={"bucket_cap_mb": 25})
    for seed in range(2):
        assert_a_step(model, seed)
    loss = model(2)
    with pytest.raises(Interrupted), Interruption(0, interrupt):
        loss.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction|unmarked_param_indices"):
            model(3)
    assert quantizer.state_dict()["steps"] == 2


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("number", range(4))
def test_an_error_with_one_gradient(number, order, rank, monkeypatch):
    """Of different buckets on the ranks, whose messages have other lengths."""
    model, _ = distributed(16, **BUCKETS)
    for seed in range(2):  # from then on gradients come as losses were added up, from the last
        a_step(model, seed, order)
    add, calls = Step.add, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == number + 1:
            raise ZeroDivisionError
        time.sleep(0.02 * (len(calls) > number))  # for what is done in the background
        add(*arguments)

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(Step, "add", failing)
        with pytest.raises(ZeroDivisionError if rank == 0 else LockstepError):
            a_step(model, 2, order)
    with pytest.raises(RuntimeError, match="was interrupted by"):
        a_step(model, 3, order)
    assert_a_step(distributed(16, **BUCKETS)[0], 2)


@pytest.mark.skipif(BACKEND == "as-nccl", reason="there, other than over NCCL, hooks wait for messages")
@pytest.mark.parametrize("unused", [False, True])
def test_an_error_within_an_exchange(unused, rank, monkeypatch):
    model, quantizer = distributed(16, ddp_arguments={"find_unused_parameters": unused})
    for seed in range(2):
        assert_a_step(model, seed)
    if rank == 0:
        monkeypatch.setattr(quantizer._plan.buckets[0].residuals, "quantized", lambda: 1 / 0)
    outcomes = trained(model, range(2, 5), contextlib.nullcontext())
    assert_ended(outcomes, model.module.mean(2), "ZeroDivisionError", 2, rank)
    assert isinstance(outcomes[0], ZeroDivisionError if rank == 0 else LockstepError)
    with pytest.raises(RuntimeError, match="was interrupted by"):
        quantizer.load_state_dict(quantizer.state_dict())


def call_controller(model, quantizer):
    quantizer.controller.step({})


def call_check_replicas(model, quantizer):
    quantizer.check_replicas()


@pytest.mark.parametrize("call", [call_controller, call_check_replicas])
def test_a_rank_that_is_late_is_waited_for(call, rank, monkeypatch):
    """Also for longer than it takes until a rank that waits looks at the others."""
    monkeypatch.setattr(torch_distributed, "_CHECK_SECONDS", 0.2)
    model, quantizer = distributed(16)
    a_step(model, 0)
    if rank == 1:
        time.sleep(1)
    call(model, quantizer)
    if rank == 0:
        time.sleep(1)
    assert_a_step(model, 1)
