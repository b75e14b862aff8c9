"""`torch.compile` around and within the model, before and after `compress`."""

import shutil

import pytest
import torch
from problem import same_on_all_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import ddp


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(512, 600), nn.Linear(600, 512)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(batch)))


def wrapped(module: nn.Module) -> DistributedDataParallel:
    """In several buckets: the compiler refuses those that are smaller than the first one's 1 MB."""
    return DistributedDataParallel(module, bucket_cap_mb=1)


def not_compiled(backend, bits):
    model = wrapped(Network())
    return model, ddp.compress(model, bits)


def around_before(backend, bits):
    model = wrapped(Network())
    compiled = torch.compile(model, backend=backend)
    return compiled, ddp.compress(model, bits)


def around_after(backend, bits):
    model = wrapped(Network())
    quantizer = ddp.compress(model, bits)
    return torch.compile(model, backend=backend), quantizer


def within(backend, bits):
    model = wrapped(torch.compile(Network(), backend=backend))
    return model, ddp.compress(model, bits)


def in_place_before(backend, bits):
    model = wrapped(Network())
    model.compile(backend=backend)
    return model, ddp.compress(model, bits)


def in_place_after(backend, bits):
    model = wrapped(Network())
    quantizer = ddp.compress(model, bits)
    model.compile(backend=backend)
    return model, quantizer


def in_place_within(backend, bits):
    module = Network()
    module.compile(backend=backend)
    model = wrapped(module)
    return model, ddp.compress(model, bits)


ORDERS = [around_before, around_after, within, in_place_before, in_place_after, in_place_within]


def trained(make, backend, bits, rank) -> tuple[list[torch.Tensor], int]:
    """The parameters after three steps, and the bytes that were compressed."""
    torch.compiler.reset()
    model, quantizer = make(backend, bits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(16, 512, generator=generator)).square().mean().backward()
        optimizer.step()
    quantizer.check_replicas()
    parameters = [parameter.detach().clone() for parameter in model.parameters()]
    assert same_on_all_ranks(parameters)
    assert {name.startswith("_orig_mod.") for name in quantizer.state_dict()["residuals"]} == {make is within}
    sent = quantizer.meter.total()
    assert sent.steps == 3 and sent.saved_fraction > 0.45
    return parameters, sent.sent_bytes


@pytest.mark.parametrize("make", ORDERS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_order_makes_no_difference(make, backend, rank):
    expected, sent = trained(not_compiled, backend, 4, rank)
    got, compressed = trained(make, backend, 4, rank)
    assert compressed == sent
    for mine, theirs in zip(got, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("make", [around_after, within])
def test_inductor_rounds_otherwise(make, rank):
    expected, sent = trained(not_compiled, "inductor", 16, rank)
    got, compressed = trained(make, "inductor", 16, rank)
    assert compressed == sent
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
