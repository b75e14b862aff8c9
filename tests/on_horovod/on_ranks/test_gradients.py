"""Every kind of gradient that Horovod's optimizer can hand over."""

import logging
import time

import horovod.torch as hvd
import pytest
import torch
from problem import Problem, assert_close, level_of, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule, Static
from hvd_dyncomp.exchange.wire import GREETING_BYTES

pytestmark = pytest.mark.promise("What Horovod's optimizer does works compressed, within the level's error.")

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


def test_unused_parameters_in_another_order_on_every_rank(rank, size):
    problem = Problem(compression=quantizer())
    names = list(problem.parameters)
    for step in range(3):
        wanted = problem.draw(seed=step)
        order = names[rank:] + names[:rank]
        unused = "matrix" if rank == 0 else "odd"
        order.remove(unused)
        reduced = problem.reduce(wanted, order)
        wanted[unused] = torch.zeros_like(wanted[unused])
        for name in names:
            mean = exact_mean(wanted[name], f"mean.{name}")
            assert_close(reduced[name], mean, PRECISE)
        assert same_on_all_ranks(reduced.values(), "reduced")


def test_no_parameter_used_on_one_rank(rank):
    problem = Problem(compression=quantizer())
    wanted = problem.draw(seed=1)
    if rank == 0:
        problem.optimizer.zero_grad()
        problem.optimizer.synchronize()
        reduced = {name: p.grad for name, p in problem.parameters.items()}
        wanted = {name: torch.zeros_like(g) for name, g in wanted.items()}
    else:
        reduced = problem.reduce(wanted)
    for name in wanted:
        mean = exact_mean(wanted[name], f"mean.{name}")
        assert_close(reduced[name], mean, PRECISE)


def test_groups_and_local_accumulation():
    for arguments in ({"groups": 2}, {"backward_passes_per_step": 2}):
        problem = Problem(compression=quantizer(), **arguments)
        passes = arguments.get("backward_passes_per_step", 1)
        wanted = problem.draw(seed=1)
        problem.optimizer.zero_grad()
        for _ in range(passes):
            torch.stack([(p * wanted[n]).sum() for n, p in problem.parameters.items()]).sum().backward()
        problem.optimizer.synchronize()
        for name, p in problem.parameters.items():
            mean = exact_mean(wanted[name] * passes, f"mean.{name}")
            assert_close(p.grad, mean, PRECISE)


def test_sparse_as_dense(rank):
    table = torch.nn.Embedding(400, 8, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), compression=quantizer(), sparse_as_dense=True
    )
    table(torch.arange(rank, 50 + rank)).sum().backward()
    optimizer.synchronize()
    own = torch.zeros(400, 8)
    own[rank : 50 + rank] = 1
    mean = exact_mean(own, "mean")
    torch.testing.assert_close(table.weight.grad.to_dense().double(), mean, rtol=1e-3, atol=1e-4)


def test_sparse_gradients_are_left_to_horovod(rank):
    table = torch.nn.Embedding(400, 8, sparse=True)
    other = torch.nn.Parameter(torch.zeros(3000))
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    q = quantizer(bucket_bytes=1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([table.weight, other], lr=1.0), compression=q)
    for _ in range(3):
        optimizer.zero_grad()
        (table(torch.arange(rank, 50 + rank)).sum() + (other * (rank + 1)).sum()).backward()
        optimizer.synchronize()
    own = torch.zeros(400, 8)
    own[rank : 50 + rank] = 1
    torch.testing.assert_close(table.weight.grad.to_dense().double(), exact_mean(own, "mean"), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(other.grad, torch.full((3000,), (hvd.size() + 1) / 2), rtol=1e-3, atol=0)


# Autograd gives two parameters one memory, or one that it reads later.
SHARED = {
    "cat": lambda a, b, c, d: torch.cat([a, b]) + torch.cat([c, d]),
    "stack": lambda a, b, c, d: torch.stack([a, b]) + torch.stack([c, d]),
    "view": lambda a, b, c, d: (a.view(-1) + b.view(-1)) * (c.view(-1) + d.view(-1)),
    "read later": lambda a, b, c, d: a.view(-1) + (b + 1).view(-1).sin() + (c + d).exp().view(-1),
}


@pytest.mark.parametrize("bits", [4, PRECISE, 32])
@pytest.mark.parametrize("shared", SHARED)
def test_gradients_that_share_memory(rank, size, shared, bits):
    """Also if a rank is late between two of them, so that others have sent what it waits for."""
    named = {name: torch.nn.Parameter(torch.zeros(64, 64)) for name in "abcd"}
    for p in named.values():
        p.data.fill_(0.5)  # of no product with zero
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(named.values(), lr=0.0),
        named_parameters=named.items(),
        compression=quantizer(bits, bucket_bytes=1),
    )
    for step in range(2):

        def loss(step=step):
            found = SHARED[shared](*named.values())
            generator = torch.Generator().manual_seed(step * size + rank)
            return (found * torch.randn(found.shape, generator=generator)).sum()

        own = dict(zip(named, torch.autograd.grad(loss(), list(named.values())), strict=True))
        late = [p.register_hook(lambda g, s=step: time.sleep(0.06 * (rank == s % size))) for p in named.values()]
        optimizer.zero_grad()
        loss().backward()
        optimizer.synchronize()
        for handle in late:
            handle.remove()
        for name, p in named.items():
            # What waits since the last step comes with this one.
            bound = {4: 0.35}.get(bits, 0)
            mean = exact_mean(own[name], f"mean.{name}")
            assert (p.grad - mean).norm() <= max(bound, 1e-3) * mean.norm(), (name, step)
        assert same_on_all_ranks([p.grad for p in named.values()], "shared")
        with optimizer.skip_synchronize():
            optimizer.step()


def test_another_default_dtype():
    torch.set_default_dtype(torch.bfloat16)
    try:
        problem = Problem(dtype=torch.float32, compression=quantizer())
        wanted = problem.draw(seed=1)
        for name, got in problem.reduce(wanted).items():
            mean = exact_mean(wanted[name], f"mean.{name}")
            assert (got.double() - mean).norm() <= 1e-2 * mean.norm(), name
    finally:
        torch.set_default_dtype(torch.float32)


def test_outside_an_optimizer_a_tensor_is_not_compressed_and_one_warning_says_so(caplog, size):
    q = quantizer(1)
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        for i in range(2):
            got = hvd.allreduce(torch.arange(5000.0) * (hvd.rank() + 1), name=f"loose{i}", compression=q)
            torch.testing.assert_close(got, torch.arange(5000.0) * (size + 1) / 2)
    assert q.meter.total().uncompressed_bytes == pytest.approx(2 * 20_000 * 2 * (size - 1) / size)
    assert [record.message for record in caplog.records if "outside" in record.message].__len__() == 1


def test_a_gradient_outside_the_optimizer_is_not_compressed_either(size):
    q = quantizer(1)
    problem = Problem(names=["long"], compression=q)
    problem.reduce(problem.draw(seed=1))
    gradient = problem.parameters["long"].grad
    before = gradient.clone()
    torch.testing.assert_close(hvd.allreduce(gradient, name="by hand", compression=q), before)


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


def test_halves_travel_as_halves_with_a_residual_as_well(size):
    """At 32 bits a residual joins its gradient in its dtype: ranks that owe nothing send the same thing."""
    q = DynamicQuantizer(Controller(Schedule({0: 4, 1: 32})))
    problem = Problem(names=["long"], dtype=torch.float16, compression=q)
    delivered, exact = 0, 0
    for epoch in range(3):
        wanted = problem.draw(seed=epoch)
        delivered = delivered + problem.reduce(wanted)["long"].double()
        exact = exact + exact_mean(wanted["long"], f"mean.{epoch}")
        q.controller.step({})
    sent = [q.meter.records[epoch, 32].uncompressed_bytes for epoch in (1, 2)]
    assert sent[0] == sent[1] and sent[0] * size / (2 * (size - 1)) == pytest.approx(5000 * 2 + GREETING_BYTES * size)
    assert (delivered - exact).norm() <= 2e-3 * exact.norm(), "what was owed after the first step arrived in the second"
