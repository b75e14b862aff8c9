"""Every kind of gradient that Horovod's optimizer can hand over."""

import logging

import horovod.torch as hvd
import pytest
import torch
from problem import Problem, assert_close, level_of

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule, Static
from hvd_dyncomp.exchange.wire import GREETING_BYTES

pytestmark = pytest.mark.promise("Features of Horovod's optimizer work with compression, within the level's error.")

PRECISE = 16  # at this level an error in the plumbing cannot hide behind quantization
LEVELS = [1, 4, PRECISE, 32]
# Relative error that gradients themselves have.
PRECISION = {torch.float16: 2e-3, torch.bfloat16: 2e-2}


def quantizer(bits=PRECISE, **arguments):
    return DynamicQuantizer(Controller(Static(bits)), **arguments)


def exact_mean(gradient, name):
    return hvd.allreduce(gradient.double(), name=name, op=hvd.Average)


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_dtypes(dtype, bits):
    problem = Problem(dtype=dtype, compression=quantizer(bits))
    wanted = problem.draw(seed=1)
    for name, got in problem.reduce(wanted).items():
        assert got.dtype == dtype
        mean = exact_mean(wanted[name], f"mean.{name}")
        assert_close(got, mean, level_of(got, bits), PRECISION.get(dtype, 0))


@pytest.mark.parametrize("bits", LEVELS)
def test_strides(bits):
    """channels_last gradients, which uncompressed Horovod refuses."""
    torch.manual_seed(0)  # broadcast_parameters refuses such strides, too
    conv = torch.nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(conv.parameters(), lr=1.0), compression=quantizer(bits))
    torch.manual_seed(hvd.rank())
    images = torch.randn(4, 16, 8, 8).to(memory_format=torch.channels_last)
    own = torch.autograd.grad(conv(images).square().sum(), conv.weight)[0]
    conv(images).square().sum().backward()
    optimizer.synchronize()
    mean = exact_mean(own.contiguous(), "mean")
    assert_close(conv.weight.grad, mean, bits)


def test_outside_an_optimizer_a_tensor_is_not_compressed_and_one_warning_says_so(caplog, size):
    q = quantizer(1)
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        for i in range(2):
            got = hvd.allreduce(torch.arange(5000.0) * (hvd.rank() + 1), name=f"loose{i}", compression=q)
            torch.testing.assert_close(got, torch.arange(5000.0) * (size + 1) / 2)
    assert [record.message for record in caplog.records if "outside" in record.message].__len__() == 1


@pytest.mark.parametrize("where", ["before backward", "after it", "in a hook"])
def test_a_tensor_that_is_averaged_within_step_is_none_of_the_optimizers(where):
    """As a loss or a norm for a log: the gradients are compressed all the same, and nothing stays in flight."""
    q = quantizer(4)
    problem = Problem(names=["long"], compression=q)
    optimizer, parameter = problem.optimizer, problem.parameters["long"]

    def average(*_):
        torch.testing.assert_close(hvd.allreduce(torch.ones(3), name="logged", compression=q), torch.ones(3))

    def closure():
        optimizer.zero_grad()
        if where == "before backward":
            average()
        (parameter * wanted["long"]).sum().backward()
        optimizer.synchronize()
        if where == "after it":
            average()

    if where == "in a hook":
        optimizer.register_step_post_hook(average)
    for seed in range(3):
        wanted = problem.draw(seed=seed)
        with optimizer.skip_synchronize():
            optimizer.step(closure)
        q.state_dict()
    assert q.meter.total().saved_fraction > 0.5  # on two hosts, bfloat16 travels within each
    assert q.meter.total().steps == 3


def test_the_level_is_fixed_while_gradients_are_in_flight():
    """Decoding depends on what was sent, not on what the controller says by then."""
    q = DynamicQuantizer(Controller(Schedule({0: 8, 1: 2})))
    problem = Problem(compression=q)
    wanted = problem.draw(seed=1)
    torch.stack([(p * wanted[n]).sum() for n, p in problem.parameters.items()]).sum().backward()
    assert q.controller.step({}) == 2
    problem.optimizer.synchronize()
    for name, p in problem.parameters.items():
        mean = exact_mean(wanted[name], f"mean.{name}")
        assert_close(p.grad, mean, 8)
    assert set(q.meter.records) == {(0, 8)}


def test_halves_are_summed_as_float32_when_what_was_owed_has_arrived(size):
    """At 32 bits, by Horovod, after a step at 16."""
    q = DynamicQuantizer(Controller(Schedule({0: 4, 1: 32})))
    problem = Problem(names=["long"], dtype=torch.float16, compression=q)
    delivered, exact = 0, 0
    for epoch in range(3):
        wanted = problem.draw(seed=epoch)
        delivered = delivered + problem.reduce(wanted)["long"].double()
        exact = exact + exact_mean(wanted["long"], f"mean.{epoch}")
        q.controller.step({})
    assert list(q.meter.records) == [(0, 4), (1, 16), (2, 32)]
    sent = q.meter.records[2, 32].sent_bytes
    assert sent * size / (2 * (size - 1)) == pytest.approx(5000 * 4 + GREETING_BYTES * size)
    assert (delivered - exact).norm() <= 2e-3 * exact.norm(), "what was owed after the first step arrived in the second"
