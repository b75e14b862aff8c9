"""Steps that something leaves in the middle: an interruption at any call, or `optimizer.load_state_dict`. Then a rank has
the same means as without it, or an error, and refuses further steps in words until a state is loaded on every rank.
"""

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import Interrupted, Interruption
from simulated import PLACES, WORLDS, Worker, on_ranks, places

from hvd_dyncomp import LockstepError

SIZES = {"a": 200, "b": 5, "c": 130, "d": 333}
SHAPE = {"bucket_bytes": 600}
CHOICES = st.lists(st.integers(0, 11), min_size=1, max_size=40)
BACKGROUND = ("_work_in_background",)  # of all ranks, by whoever has the turn; in training it has a thread of its own
LEFT = r"step( \d+)? was left in the middle by"


def same_on_all(seen: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, seen[0], other)) for other in seen)


def clean_step(worker: Worker, step: int) -> list[torch.Tensor]:
    return list(worker.step(worker.noise(step)).values())


def interrupt():
    raise Interrupted


def interrupted(number: int) -> Interruption:
    return Interruption(number, interrupt, lambda: False, BACKGROUND)


def trained(worker: Worker, level: int, interruption: Interruption) -> list[list[torch.Tensor] | Exception]:
    """Trains three steps, the second at a level and with an interruption, after which it goes on as if nothing were.

    Returns, of each step, the means or the error.
    """
    outcomes: list[list[torch.Tensor] | Exception] = []
    for step in range(3):
        if step == 1 and level != 4:
            worker.set_level(level)
        here = interruption if step == 1 and worker.transport.rank == 0 else interrupted(-1)
        optimizer = worker.optimizer
        optimizer.zero_grad()
        try:
            for name, gradient in worker.noise(step).items():
                here.hits(lambda name=name, gradient=gradient: optimizer.backward(worker.parameters[name], gradient))
            if here.hits(optimizer.synchronize):
                optimizer.synchronize()
            outcomes.append([p.grad.clone() for p in worker.parameters.values()])
        except RuntimeError as error:
            outcomes.append(error)
            optimizer.forget()
            optimizer._means.clear()
        optimizer._synchronized = False
    return outcomes


@places("2", "3", "2x2")
@pytest.mark.parametrize("level", [4, 32], ids=["compressed", "released"])
def test_an_interruption_at_every_call(ranks, hosts, level):
    def run(number: int):
        interruption = interrupted(number)
        seen, _ = on_ranks(ranks, lambda worker: trained(worker, level, interruption), SIZES, 4, hosts=hosts, **SHAPE)
        return seen, interruption.calls

    expected, calls = run(-1)
    assert calls > 50
    refused = 0
    for number in range(calls):
        seen, reached = run(number)
        assert reached > number
        for rank, outcomes in enumerate(seen):
            for step, means in enumerate(outcomes):
                if isinstance(means, Exception):
                    assert step > 0
                    own = LEFT if rank == 0 else "gave up the exchange|rank 0 cannot use its DynamicQuantizer"
                    assert re.search(own, str(means)), (number, means)
                else:
                    assert all(map(torch.equal, means, expected[rank][step])), f"interrupted at call {number}"
        # No rank goes on when another one does not.
        assert len({isinstance(outcomes[2], Exception) for outcomes in seen}) == 1, number
        refused += isinstance(seen[0][2], Exception)
    assert 0 < refused < calls
