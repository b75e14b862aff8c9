"""Sums of what travels uncompressed: a rank that has an error is heard, also where it has it before the sum begins."""

import pytest
import torch

from hvd_dyncomp import LockstepError
from hvd_dyncomp.exchange.sums import Sums
from hvd_dyncomp.transport.in_process import World


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64])
def test_an_error_of_before_the_sum_reaches_all(dtype):
    """And nobody's gradient changes."""

    def program(transport):
        sums = Sums(transport, "0", 0.5)
        mine = ValueError("mine") if transport.rank == 0 else None
        gradient = torch.ones(3, dtype=dtype)
        sums.add("first", {"weight": gradient}, {"weight": gradient}, mine)
        [one] = sums.tasks
        one.start()
        one.wait()
        with pytest.raises(ValueError if mine else LockstepError, match="mine" if mine else "a rank gave up this step"):
            one.conclude()
        assert torch.equal(gradient, torch.ones(3, dtype=dtype))

    World(2).run(program)
