"""One tensor of 200 million values."""

import resource

import horovod.torch as hvd
import pytest
import torch

from hvd_dyncomp import Controller, DynamicQuantizer, Static

pytestmark = pytest.mark.promise("Memory use does not grow during training; one tensor may have 200 million values.")

VALUES = 200_000_000


@pytest.mark.parametrize("bits", [4])
def test_200_million_values(bits, rank, size):
    parameter = torch.nn.Parameter(torch.zeros(VALUES))
    quantizer = DynamicQuantizer(Controller(Static(bits)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([parameter], lr=1.0), named_parameters=[("large", parameter)], compression=quantizer
    )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # A gradient in the parameter's own memory would be too easy: sums of ranks differ from it.
    parameter.backward(torch.full((VALUES,), rank + 1.0))
    optimizer.step()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(f"rank {rank} of {size}: {grown / VALUES:.1f} bytes a value beside parameter", flush=True)
    expected = torch.full((10,), -(size + 1) / 2)
    torch.testing.assert_close(parameter.detach()[:10], expected, rtol=0.05, atol=0)
    torch.testing.assert_close(parameter.detach()[-10:], expected, rtol=0.05, atol=0)
    # Gradient 4, residual 2, shard residual 2 / N; codes b / 8 for each message, twice while Horovod copies.
    assert grown / VALUES < 4 + 2 + 2 / size + (size + 3) * bits / 8 + 4
