"""A rank that an exception leaves in the middle of a step: an error on every rank, or the same means as without it.

Afterwards all ranks load the states of optimizer and quantizer, and train on.
"""

from __future__ import annotations

import copy
import functools
import re
import sys
from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from interruption import Interrupted, Interruption
from problem import Linear, distribute, ours, same_on_all_ranks, weights

pytestmark = [
    pytest.mark.promise("After an interruption means are right, or the rank refuses steps."),
    pytest.mark.timeout(120, method="thread"),
]
STRIDE = 5  # of the calls that are interrupted: all of them take minutes
LEFT = r"step( \d+)? was left in the middle by"
# Calls between two collectives of an exchange. The others hear of an interruption there by the end of the job: see
# left_alone.py.
BETWEEN = {"_all_of_it", "collectives", "_first_messages", "_group", "name", "<listcomp>"}


class Run:
    """A model in training, and the state to which it goes back.

    Args:
        bits, name: level, and part of the names of collectives.
    """

    def __init__(self, bits: float, name: str, **arguments) -> None:
        self.name, self.model = name, Linear()
        self.optimizer = distribute(self.model, ours(bits, bucket_bytes=8192, **arguments), prefix=f"{name}.")
        self.quantizer = self.optimizer._compression

    def forward(self, seed: int) -> torch.Tensor:
        self.optimizer.zero_grad()
        return self.model(seed)

    def means(self) -> list[torch.Tensor]:
        return [value.grad.clone() for value in self.model.values]

    def step(self, seed: int) -> list[torch.Tensor]:
        self.forward(seed).backward()
        self.optimizer.step()
        return self.means()

    def save(self) -> None:
        self._saved = copy.deepcopy(self.quantizer.state_dict())
        self._weights = weights(self.model)

    def restore(self) -> None:
        """Collective."""
        hvd.barrier()  # what Horovod has got of the step that was left is reduced
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        self.quantizer.load_state_dict(self._saved)
        for value, saved in zip(self.model.values, self._weights, strict=True):
            value.data.copy_(saved)


def same_at(bits: float, size: int) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """Of three ranks and more, Horovod adds up what it has fused in another order than what it has not."""
    return torch.equal if bits < 32 or size == 2 else functools.partial(torch.allclose, rtol=1e-5, atol=1e-6)


def everyone(value: object, name: str) -> list:
    return hvd.allgather_object(value, name=name)


def interrupt() -> None:
    frame = sys._getframe(2)  # of the call
    if not (frame.f_code.co_name in BETWEEN and "/exchange/" in frame.f_code.co_filename):
        raise Interrupted


@pytest.mark.parametrize("bits", [4, 32])
def test_at_every_call(bits, rank, size):
    same = same_at(bits, size)
    run = Run(bits, f"interrupted.{bits}")
    run.step(0)
    run.save()
    expected, after = run.step(1), run.step(2)
    number, calls, errors = 0, 1, 0
    while number < calls:
        run.restore()
        here = Interruption(number if rank == size - 1 else -1, interrupt)
        error: Exception | None = None
        cut = False
        try:
            loss = run.forward(1)
            cut = here.hits(loss.backward)  # then Horovod takes zeros for what backward has not made
            if here.hits(run.optimizer.synchronize):
                run.optimizer.synchronize()
        except RuntimeError as caught:
            error = caught
            assert re.search(f"{LEFT}|gave up the exchange", str(error))
        outcomes = everyone((here.calls, error is None, cut), run.name)
        calls, well, cut = outcomes[-1]
        errors += not well
        if error is None:
            assert cut or all(map(same, run.means(), expected)), number
        if well:
            assert same_on_all_ranks(run.means(), run.name)
        number += STRIDE
    assert 0 < errors < calls
    run.restore()
    assert all(map(same, run.step(1), expected))
    assert all(map(same, run.step(2), after))
