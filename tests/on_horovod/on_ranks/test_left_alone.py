"""An error ends a step on one rank, whose process ends with it, and so does the job: the others wait for it."""

import os
import time

import pytest
from problem import Linear, distribute, ours

from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.exchange.step import Step

WHERE = {"in a hook": (Step, "add", MemoryError), "in an exchange": (Messages, "name", KeyboardInterrupt)}


def test_the_job_ends(rank, monkeypatch):
    model = Linear()
    optimizer = distribute(model, ours(4))

    def step(seed: int) -> None:
        optimizer.zero_grad()
        model(seed).backward()
        optimizer.step()

    step(0)
    if rank != 1:
        step(1)
        return
    owner, name, error = WHERE[os.environ["HVD_DYNCOMP_TEST_WHERE"]]

    def fails(*arguments):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fails)
        with pytest.raises(error):
            step(1)
    with pytest.raises(RuntimeError, match=f"was interrupted by {error.__name__}.*restart all ranks"):
        optimizer.synchronize()
    print(f"\nrank 1 ends at {time.time()}\n", flush=True)
    raise SystemExit("rank 1 ends")
