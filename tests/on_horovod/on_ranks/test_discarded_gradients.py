"""Gradients that are exchanged and thrown away, as those of a GAN's discriminator in the generator's pass.

Each step throws a gradient of always the same direction away, and then uses one that is orthogonal to it.
"""

import horovod.torch as hvd
import pytest
import torch
from problem import ours

pytestmark = pytest.mark.promise("After `quantizer.discard()` a step leaves no trace.")

VALUES, STEPS = 4096, 40
SAME = torch.randn(VALUES, generator=torch.Generator().manual_seed(7))


def error_of_used(bits: float, how: str) -> float:
    """Relative error of the sum of all means that were used."""
    parameter = torch.nn.Parameter(torch.zeros(VALUES))
    quantizer = ours(bits, discardable=how == "discard")()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=0.0), named_parameters=[(f"{how}.{bits}", parameter)], compression=quantizer
    )
    generator = torch.Generator().manual_seed(20 + hvd.rank())
    used, true = torch.zeros(VALUES), torch.zeros(VALUES)
    for step in range(STEPS):
        waste = SAME + torch.randn(VALUES, generator=generator)
        gradient = torch.randn(VALUES, generator=generator)
        gradient -= SAME * (gradient @ SAME) / (SAME @ SAME)
        if how != "not exchanged":
            (parameter * waste).sum().backward()
            optimizer.synchronize()
            if how == "discard":
                quantizer.discard()
            elif how == "drop":
                quantizer.drop_residuals()
        else:
            parameter.requires_grad_(False)
            assert not (parameter * waste).sum().requires_grad
            parameter.requires_grad_(True)
        optimizer.zero_grad()
        (parameter * gradient).sum().backward()
        optimizer.synchronize()
        used += parameter.grad
        true += hvd.allreduce(gradient, name=f"true.{step}", op=hvd.Average)
        with optimizer.skip_synchronize():
            optimizer.step()
    return float((used - true).norm() / true.norm())


@pytest.mark.parametrize("bits", [0.25, 4])
def test_discard_is_as_good_as_no_exchange(bits):
    errors = {how: error_of_used(bits, how) for how in ("thrown away", "drop", "discard", "not exchanged")}
    assert errors["discard"] <= 1.1 * errors["not exchanged"]
    assert min(errors["thrown away"], errors["drop"]) > 1.5 * errors["discard"], errors
