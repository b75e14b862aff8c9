"""The contract of a transport, on ranks in one process and on one process alone."""

import random

import pytest
from contract import CHECKS

from hvd_dyncomp.simulate import World
from hvd_dyncomp.transport.alone import Alone


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("check", CHECKS)
def test_simulated_ranks(check, size):
    """In any order, as ranks that poll wait for nobody, and without choices never lose their turn."""
    order = random.Random(size)
    World(size, [order.randrange(6) for _ in range(997)]).run(check)


@pytest.mark.parametrize("check", CHECKS)
def test_a_process_alone(check):
    check(Alone())
