"""Calls of all ranks that some make earlier than others, or make others in place of: torch matches them by order."""

import threading
import time

import pytest
import torch
from problem import assert_means, distributed, gradients

from hvd_dyncomp import AllRanks, LockstepError

CALLS = {
    "AllRanks.state_dict": lambda quantizer: AllRanks(quantizer).state_dict(),
    "check_replicas": lambda quantizer: quantizer.check_replicas(),
    "Controller.step": lambda quantizer: quantizer.controller.step({}),
}


def assert_a_step(model, seed: int) -> None:
    model.zero_grad()
    model(seed).backward()
    assert_means(gradients(model), model.module.mean(seed), 16)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("call", CALLS)
def test_one_is_waited_for_beside_a_step(call, rank):
    """As when rank 0 saves alone: no message of a step arrives in it."""
    model, quantizer = distributed(16)
    assert_a_step(model, 0)
    alone = threading.Thread(target=CALLS[call], args=(quantizer,))
    if rank == 0:
        alone.start()
        time.sleep(0.5)
    assert_a_step(model, 1)
    if rank == 0:
        alone.join()
    else:
        CALLS[call](quantizer)
    assert_a_step(model, 2)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("others", [name for name in CALLS if name != "AllRanks.state_dict"])
def test_different_ones_are_an_error_on_all_ranks(others, rank):
    model, quantizer = distributed(16)
    assert_a_step(model, 0)
    with pytest.raises(LockstepError, match="every rank must make the same calls in the same order"):
        CALLS["AllRanks.state_dict" if rank == 0 else others](quantizer)
    quantizer.check_replicas()
    assert torch.equal(*[AllRanks(quantizer).state_dict()["ranks"][0] for _ in range(2)])
