"""One rank is late in `Controller.step`, or all others are: who waits says so, and what comes out is right.

The one is that in HVD_DYNCOMP_TEST_ALONE. A rank that never comes is waited for without end, as Horovod does.
"""

from __future__ import annotations

import os
import time

import pytest
from problem import Linear, distribute, same_on_all_ranks, weights

from hvd_dyncomp import Controller, DynamicQuantizer, Static

pytestmark = pytest.mark.timeout(60, method="thread")

PATIENCE, LATE = 1.0, 2.5  # seconds


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


@pytest.mark.parametrize("late", [True, False])
def test_who_waits_says_so_and_a_late_rank_does_no_harm(late, alone, rank, caplog, monkeypatch):
    """Either that rank is late, or all the others are."""
    monkeypatch.setattr("hvd_dyncomp.controller.LATE_SECONDS", PATIENCE)
    run = Run(f"late.{late}")
    for epoch in range(2):
        run.train(epoch)
        if (rank == alone) == late:
            time.sleep(LATE)
        assert run.controller.step({"accuracy": 0.5}) == 4
    run.train(2)
    assert same_on_all_ranks(weights(*run.models), f"late.{late}")
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert len(said) == (2 if (rank == alone) != late else 0), said
    for line in said:
        assert f"rank {rank} has waited 1 s in Controller.step for other ranks: every rank must call" in line
        assert "use 'if hvd.rank() == 0:' only for code that prints or saves" in line
