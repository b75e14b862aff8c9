"""What leaves a hook in the middle, and errors that a program catches: the model stays usable, or says why not.

Then every rank has the same means as without it, or an error in words in every step until a state is loaded.
"""

import copy
import re
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist
from interruption import Interrupted, Interruption
from problem import assert_means, distributed, gradients, same_on_all_ranks
from process_group import BACKEND

from hvd_dyncomp import LockstepError, ddp

pytestmark = pytest.mark.promise("DDP: errors in hooks come out of `backward`.")

STRIDE = 5  # of the calls that are interrupted: all of them take minutes
LEFT = r"step( \d+)? was left in the middle by"
# Calls between two collectives of an exchange: the others hear of it when their time limit is over.
BETWEEN = {"_all_of_it", "collectives", "_first_messages", "_group", "name", "<listcomp>"}
# Those that torch makes: what is raised there is torch's.
TORCHS = {"_hook", "<lambda>", "_at_end", "_raise", "_raise_later"}


def interrupt(*signal_and_frame):
    raise Interrupted


def interrupt_call() -> None:
    frame = sys._getframe(2)
    name = frame.f_code.co_name
    if name not in TORCHS and not (name in BETWEEN and "/exchange/" in frame.f_code.co_filename):
        raise Interrupted


@pytest.fixture
def handler():
    before = signal.signal(signal.SIGALRM, interrupt)
    yield
    signal.signal(signal.SIGALRM, before)


def a_step(model, seed: int) -> list[torch.Tensor]:
    model.zero_grad()
    model(seed).backward()
    return gradients(model)


def assert_a_step(model, seed: int, bits: float = 16) -> None:
    a_step(model, seed)
    assert_delivered(model, seed, bits)


def assert_delivered(model, seed: int, bits: float = 16) -> None:
    assert same_on_all_ranks(gradients(model))
    assert_means(gradients(model), model.module.mean(seed), bits)


def everyone(value: object) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


@pytest.mark.parametrize("graph", ["", "find_unused_parameters", "static_graph"])
def test_a_handler_raises_while_backward_waits_for_a_late_rank(graph, rank, handler):
    """It leaves the step, as every error does: the others hear of it, and all go on from a state that all load.

    What was sent before makes means that are right.
    """
    model, quantizer = distributed(16, ddp_arguments={graph: True} if graph else {})
    state = copy.deepcopy(quantizer.state_dict())
    for seed in range(2 if graph != "static_graph" else 0):  # where the first pass ends otherwise than later ones
        assert_a_step(model, seed)
    model.zero_grad()
    loss = model(2)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            loss.backward()
    else:
        time.sleep(1)
        try:
            loss.backward()
        except LockstepError as error:
            assert "rank 0 gave up the exchange" in str(error)
        else:
            assert_means(gradients(model), model.module.mean(2), 16)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"{LEFT} (Interrupted|LockstepError)"):
            model(3).backward()
    quantizer.load_state_dict(state)
    for seed in range(2):
        assert_a_step(model, seed)


@pytest.mark.parametrize("kind", ["compressed", "released", "skipped", "unused"])
def test_at_every_call(kind, rank):
    """Of a hook, and of what waits where backward ends; in models of several buckets."""
    model, quantizer = distributed(
        32 if kind == "released" else 16,
        ddp_arguments={"find_unused_parameters": kind == "unused"},
        skip=(lambda name, parameter: parameter.numel() == 2048) if kind == "skipped" else None,
    )
    for seed in range(2):  # from then on the buckets are in another order
        a_step(model, seed)
    state = copy.deepcopy(quantizer.state_dict())
    expected, after = a_step(model, 2), a_step(model, 3)
    number, calls, errors = 0, 1, 0
    while number < calls:
        quantizer.load_state_dict(state)
        model.zero_grad()
        loss = model(2)
        error: BaseException | None = None
        here = Interruption(number if rank == 0 else -1, interrupt_call, ("_in_background",))
        with here:
            try:
                loss.backward()
            except (RuntimeError, Interrupted) as caught:
                error = caught
        if error is None:
            assert all(map(torch.equal, gradients(model), expected)), number
        try:
            going_on = a_step(model, 3)
        except RuntimeError as caught:
            assert re.search(LEFT, str(caught))
            assert error is not None or rank > 0
            going_on = None
        else:
            assert rank > 0 or error is None or isinstance(error, Interrupted)
            assert all(map(torch.equal, going_on, after)), number
        outcomes = everyone((here.calls, going_on is None))
        assert len({refuses for _, refuses in outcomes}) == 1, number
        calls = outcomes[0][0]
        errors += going_on is None
        number += STRIDE
    assert 0 < errors < calls
    quantizer.load_state_dict(state)
    assert all(map(torch.equal, a_step(model, 2), expected))


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
    """The others wait for aborts in the order in which their own buckets come. Other lengths would end the process."""
    model, quantizer = distributed(16, bucket_bytes=4000)
    for seed in range(2):  # from then on gradients come as losses were added up, from the last
        model.zero_grad()
        model(seed, order).backward()
    state = copy.deepcopy(quantizer.state_dict())
    add, calls = ddp.quantizer.Step.add, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == number + 1:
            raise ZeroDivisionError
        time.sleep(0.02 * (len(calls) > number))  # for what is done in the background
        add(*arguments)

    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(ddp.quantizer.Step, "add", failing)
        with pytest.raises(ZeroDivisionError if rank == 0 else LockstepError):
            model(2, order).backward()
    quantizer.load_state_dict(state)
    assert_a_step(model, 2)


@pytest.mark.skipif(BACKEND == "as-nccl", reason="there, other than over NCCL, hooks wait for messages")
@pytest.mark.parametrize("unused", [False, True])
def test_an_error_that_a_program_catches(unused, rank, monkeypatch):
    """In a hook, or in an exchange: every later step says so, until a state is loaded."""
    model, quantizer = distributed(16, ddp_arguments={"find_unused_parameters": unused})
    for seed in range(2):
        assert_a_step(model, seed)
    state = copy.deepcopy(quantizer.state_dict())
    for in_hook in (True, False):
        with monkeypatch.context() as patch:
            if rank == 0:
                where = (ddp.quantizer.Step, "add") if in_hook else (quantizer._plan.buckets[0].residuals, "quantized")
                patch.setattr(*where, lambda *arguments: 1 / 0)
            with pytest.raises(ZeroDivisionError if rank == 0 else LockstepError):
                model(2).backward()
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"{LEFT} (ZeroDivisionError: division by zero|LockstepError)"):
                model(2).backward()
        quantizer.load_state_dict(state)
        assert_a_step(model, 2)
        quantizer.load_state_dict(state)
