"""One rank calls `Controller.step`, and the others go on: the rank in HVD_DYNCOMP_TEST_ALONE. A job of its own.

What that rank has begun nobody ends.
"""

from __future__ import annotations

import os
import time

import pytest
from problem import Linear, distribute, same_on_all_ranks, weights

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Static

pytestmark = pytest.mark.timeout(60, method="thread")


class Run:
    def __init__(self, prefix: str) -> None:
        self.controller = Controller(Static(4))
        self.models = [Linear(), Linear()]
        self.optimizers = [
            distribute(model, lambda: DynamicQuantizer(self.controller), prefix=f"{prefix}.{i}.")
            for i, model in enumerate(self.models)
        ]

    def train(self, seed: int) -> None:
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            model(seed).backward()
            optimizer.step()


@pytest.fixture
def alone(size) -> int:
    return int(os.environ.get("HVD_DYNCOMP_TEST_ALONE", "0")) % size


def test_a_rank_that_comes_late_does_no_harm(rank, alone):
    run = Run("late")
    for epoch in range(3):
        run.train(epoch)
        if (rank == alone) == (epoch < 2):
            time.sleep(2.5)  # more than the others wait before they look around
        assert run.controller.step({"accuracy": 0.5}) == 4
    run.train(3)
    assert same_on_all_ranks(weights(*run.models), "late")


def test_every_rank_hears_of_it(rank, size, alone):
    run = Run("alone")
    run.train(0)
    other = 1 if alone == 0 else 0
    with pytest.raises(LockstepError, match=f"rank {alone} is in Controller.step, and rank {other} goes on training"):
        if rank == alone:
            run.controller.step({"accuracy": 0.5})
        run.train(1)
