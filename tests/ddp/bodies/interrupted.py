"""Signal handlers that raise, and errors that a program catches: the model can be used afterwards, or says why not."""

import signal
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from problem import Linear, assert_means, distributed, gradients, same_on_all_ranks
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import LockstepError, ddp

sys.path.append(str(Path(__file__).parents[2]))
from interruption import Interrupted, Interruption


def interrupt(*signal_and_frame):
    raise Interrupted


@pytest.fixture
def handler():
    before = [(number, signal.signal(number, interrupt)) for number in (signal.SIGALRM, signal.SIGUSR1)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def assert_a_step(model, seed: int, bits: float = 16) -> None:
    model.zero_grad()
    model(seed).backward()
    assert_delivered(model, seed, bits)


def assert_delivered(model, seed: int, bits: float = 16) -> None:
    assert same_on_all_ranks(gradients(model))
    assert_means(gradients(model), model.module.mean(seed), bits)


@pytest.mark.parametrize("graph", ["", "find_unused_parameters", "static_graph"])
def test_a_handler_raises_while_backward_waits_for_a_late_rank(graph, rank, handler):
    """Backward raises it when it has ended; nothing is lost, and the run goes on."""
    model, quantizer = distributed(16, ddp_arguments={graph: True} if graph else {})
    assert_a_step(model, 0)
    model.zero_grad()
    loss = model(1)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        with pytest.raises(Interrupted):
            loss.backward()
        assert quantizer.state_dict()["steps"] == 2
    else:
        time.sleep(1)
        loss.backward()
    assert_delivered(model, 1)
    assert_a_step(model, 2)


def test_a_handler_raises_at_any_call_of_a_hook(rank, handler):
    """But the first, whose exception is torch's: see the next check."""
    model, _ = distributed(16, ddp_arguments={"bucket_cap_mb": 25})
    for seed in range(2):  # from then on there is one bucket
        assert_a_step(model, seed)
    number, interruption = 1, None
    while interruption is None or interruption.calls > interruption.number:
        number += 1
        model.zero_grad()
        loss = model(number)
        interruption = Interruption(
            number if rank == 0 else -1,
            lambda: signal.raise_signal(signal.SIGUSR1),
            lambda: signal.getsignal(signal.SIGUSR1) is not interrupt,
            spared=("waiting", "_raise", "_in_background"),
        )
        raised = False
        with interruption:
            try:
                loss.backward()
            except Interrupted:
                raised = True
        assert raised == (rank == 0 and interruption.calls > number)
        assert_delivered(model, number)
        over = [None]
        if rank == 0:
            over = [interruption.calls <= number]
        dist.broadcast_object_list(over)
        if over[0]:
            break
    assert number > 3


def test_a_handler_raises_where_torch_calls_the_hook(handler):
    """It ends backward at once, and torch refuses every later forward, as after any error within backward."""
    model, quantizer = distributed(16, ddp_arguments={"bucket_cap_mb": 25})
    for seed in range(2):
        assert_a_step(model, seed)
    loss = model(2)
    with pytest.raises(Interrupted), Interruption(0, lambda: signal.raise_signal(signal.SIGUSR1), lambda: False):
        loss.backward()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected to have finished reduction|unmarked_param_indices"):
            model(3)
    assert quantizer.state_dict()["steps"] == 2


def test_an_error_of_an_exchange_that_a_program_catches(rank, monkeypatch):
    model, quantizer = distributed(16)
    for seed in range(2):
        assert_a_step(model, seed)
    for seed in range(2, 4):
        with monkeypatch.context() as patch:
            if rank == 0:
                patch.setattr(quantizer._plan.buckets[0].residuals, "quantized", lambda: 1 / 0)
            with pytest.raises(ZeroDivisionError if rank == 0 else LockstepError):
                model(seed).backward()
        assert_a_step(model, seed)


@pytest.mark.parametrize("unused", [False, True])
def test_a_rank_that_cannot_take_its_gradients_says_so_until_a_state_is_loaded(unused, rank, monkeypatch):
    model, quantizer = distributed(16, ddp_arguments={"find_unused_parameters": unused})
    assert_a_step(model, 0)
    state = quantizer.state_dict()
    with monkeypatch.context() as patch:
        if rank == 0:
            patch.setattr(quantizer._plan.tickets, "fill", lambda *arguments: 1 / 0)
        with pytest.raises(ZeroDivisionError if rank == 0 else LockstepError):
            model(1).backward()
    for _ in range(2):
        with pytest.raises(
            ZeroDivisionError if rank == 0 else LockstepError,
            match="zero" if rank == 0 else "rank 0 cannot use its DynamicQuantizer: division by zero",
        ):
            model(1).backward()
    quantizer.load_state_dict(state)
    assert_a_step(model, 1)


def test_ranks_that_disagree_do_so_in_every_step(rank, size):
    model = DistributedDataParallel(Linear(), process_group=dist.new_group())
    quantizer = ddp.compress(model, 8 if rank == size - 1 else 4)
    for _ in range(3):
        with pytest.raises(LockstepError, match="has bits"):
            model(0).backward()
        quantizer.state_dict()
