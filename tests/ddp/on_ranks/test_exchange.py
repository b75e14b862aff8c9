"""What a backward pass makes of gradients."""

import contextlib
import gc
import os
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from problem import Linear, assert_means, distributed, gradients, same_on_all_ranks
from process_group import BACKEND
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import LockstepError, ddp
from hvd_dyncomp.meter import allreduce_bytes


@pytest.mark.parametrize("bits", [1, 2, 4, 8, 16, 32])
def test_the_mean_is_the_expected_one_and_the_same_everywhere(bits):
    model, quantizer = distributed(bits)
    for seed in range(3):  # buckets are built anew after the first; gradients add up
        model(seed).backward()
        got = gradients(model)
        assert same_on_all_ranks(got)
        means = [model.module.mean(before) for before in range(seed + 1)]
        assert_means(got, [sum(each) for each in zip(*means, strict=True)], bits)
    assert quantizer.bits == bits
    sent = quantizer.meter.total()
    assert sent.steps == 3 and (sent.saved_fraction > 0) == (bits != 32)


def undelivered(quantizer, state, name):
    """What all ranks together owe of a parameter, in a quantizer's state."""
    kept = state["residuals"][name].double()
    dist.all_reduce(kept)
    for bucket in quantizer._plan.buckets:
        for slot in bucket.slots:
            if slot.name == name and bucket.section.sharded:
                own = torch.zeros(bucket.blocks * bucket.block_size, dtype=torch.float64)
                if shard := state["shard_residuals"].get(bucket.name):
                    own[bucket.residuals.shard_range] = shard["values"].double()
                dist.all_reduce(own)
                kept += own[slot.range].view(kept.shape)
    return kept


def test_what_is_not_delivered_is_in_the_residuals(size):
    """Over steps: sum of gradients == sum of means * ranks + residuals of all ranks."""
    model, quantizer = distributed(2, min_numel=1, hierarchical=False)  # whose bfloat16 loses a little
    owed = [torch.zeros_like(value, dtype=torch.float64) for value in model.module.values]
    for seed in range(4):
        model.zero_grad()
        model(seed).backward()
        for total, wanted, got in zip(owed, model.module.mean(seed), gradients(model), strict=True):
            total += size * (wanted - got.double())
        state = quantizer.state_dict()
        for i, total in enumerate(owed):
            kept = undelivered(quantizer, state, f"values.{i}")
            rounded = (seed + 1) * 2.0**-6 * kept.abs().max()  # residuals are bfloat16
            assert (kept - total).abs().max() < 1e-4 + rounded, f"values.{i} in step {seed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bits", [4, 32])
def test_what_is_not_compressed_travels_in_its_own_dtype(dtype, bits, monkeypatch):
    """As without this package, in as many bytes."""
    model, quantizer = distributed(bits, module=Linear(dtype=dtype), skip=lambda name, parameter: name == "values.0")
    sent, transport = [], quantizer._source.transport
    start = transport.sum

    def listed(tensor, name):
        if name.endswith("uncompressed"):
            sent.append(tensor)
        return start(tensor, name)

    monkeypatch.setattr(transport, "sum", listed)
    model(0).backward()
    values = sum(Linear.SIZES) if bits == 32 else Linear.SIZES[0]
    assert {tensor.dtype for tensor in sent} == {dtype}
    assert sum(tensor.numel() for tensor in sent) == values


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("graph", ["", "find_unused_parameters", "static_graph"])
def test_ways_of_building_a_model(views, graph):
    arguments = {"gradient_as_bucket_view": views, **({graph: True} if graph else {})}
    model, _ = distributed(16, ddp_arguments=arguments)
    for seed in range(3):
        model.zero_grad()
        model(seed).backward()
        assert same_on_all_ranks(gradients(model))
        assert_means(gradients(model), model.module.mean(seed), 16)


class Mixed(nn.Module):
    """Parameters of several dtypes, and so several buckets in the first pass."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = nn.ModuleList(
            [Linear((3000,), dtype) for dtype in (torch.float32, torch.float64, torch.complex64)]
        )

    def forward(self, seed: int) -> torch.Tensor:
        return sum(kind(seed) for kind in self.kinds)


@pytest.mark.parametrize("bits", [16, 32])
def test_a_static_graph_with_several_buckets_in_its_first_pass(bits):
    """Torch then calls none the last."""
    plain = DistributedDataParallel(Mixed())
    model, quantizer = distributed(bits, module=Mixed(), ddp_arguments={"static_graph": True})
    for seed in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(seed).backward()
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            assert (ours - theirs).norm() <= 1e-3 * theirs.norm()
    assert quantizer.meter.total().steps == 3


def test_unused_parameters(rank, size):
    """One that a single rank has used has a mean; one that nobody has used keeps what it had."""
    model, _ = distributed(16, ddp_arguments={"find_unused_parameters": True})
    for seed in range(3):
        model.zero_grad()
        model(seed, (0, 1) if rank == 0 else (0,)).backward()
        expected = [model.module.mean(seed)[0], model.module.noise(seed, 0)[1].double() / size]
        assert_means([parameter.grad for parameter in model.parameters()][:2], expected, 16)
        assert model.module.values[2].grad is None


@pytest.mark.parametrize("bits", [0.25, 1, 4])
@pytest.mark.parametrize("views", [False, True])
def test_what_no_rank_uses_keeps_what_it_is_owed(bits, views, rank):
    """A large one. DDP decides what its `grad` is, as without compression."""
    arguments = {"find_unused_parameters": True, "gradient_as_bucket_view": views}
    model, quantizer = distributed(bits, ddp_arguments=arguments)
    for seed in range(3):
        model.zero_grad()
        model(seed).backward()
    for seed in range(3, 6):
        before = quantizer.state_dict()
        model.zero_grad()
        model(seed, (0, 1, 3) if rank == 0 else (0, 3)).backward()
        after = quantizer.state_dict()
        assert torch.equal(after["residuals"]["values.2"], before["residuals"]["values.2"])
        then, since = (undelivered(quantizer, state, "values.2") for state in (before, after))
        assert torch.equal(since, then) and then.any()
        assert model.module.values[2].grad is None and model.module.values[1].grad.any()
    assert same_on_all_ranks([model.module.values[i].grad for i in (0, 1, 3)])


@pytest.mark.parametrize("views", [False, True])
def test_no_sync_accumulates(views):
    model, quantizer = distributed(16, ddp_arguments={"gradient_as_bucket_view": views})
    for step in range(2):
        model.zero_grad()
        for seed in (10 * step, 10 * step + 1):
            with model.no_sync() if seed % 10 == 0 else contextlib.nullcontext():
                model(seed).backward()
        means = [model.module.mean(10 * step + i) for i in range(2)]
        assert_means(gradients(model), [one + other for one, other in zip(*means, strict=True)], 16)
    assert quantizer.meter.total().steps == 2


@pytest.mark.parametrize("skips", [False, True])
def test_two_models_in_one_backward(skips, rank):
    """Whose gradients come in another order on each rank, and at other levels."""
    some = {"skip": lambda name, parameter: name == "values.0"} if skips else {}
    pairs = [distributed(bits, module=Linear((3000, 1100, 7)), **some) for bits in (8, 16)]
    for seed in range(3):
        for model, _ in pairs:
            model.zero_grad()
        losses = [model(seed) for model, _ in pairs]
        sum(losses[:: -1 if rank % 2 else 1]).backward()
        for (model, _), bits in zip(pairs, (8, 16), strict=True):
            assert same_on_all_ranks(gradients(model))
            assert_means(gradients(model), model.module.mean(seed), bits)
    assert len({quantizer._source.label for _, quantizer in pairs}) == 2


def test_two_models_one_after_the_other_in_another_order(rank):
    """Each rank waits at once for what others do only later: the transport does not mind, nor do futures.

    As with plain DistributedDataParallel, what is waited for must not depend on the order: one backward of both.
    """
    pairs = [distributed(8, module=Linear((3000, 7)), ddp_arguments={"static_graph": True}) for _ in range(2)]
    for seed in range(2):
        for model, _ in pairs:
            model.zero_grad()
        sum(model(seed) for model, _ in pairs).backward()
        for model, _ in pairs:
            assert_means(gradients(model), model.module.mean(seed), 8)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(500, 8, sparse=True)
        self.dense = nn.Linear(8, 300)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.dense(self.embedding(rows)).square().sum()


@pytest.mark.skipif(BACKEND != "gloo", reason="NCCL adds no sparse tensors")
def test_sparse_gradients(rank):
    """They stay sparse, and are averaged as they are; the others travel compressed."""
    rows = torch.arange(10) * (rank + 1)
    plain = DistributedDataParallel(Sparse())
    model, quantizer = distributed(16, module=Sparse())
    for each in (plain, model):
        each(rows).backward()
    ours, theirs = model.module.embedding.weight.grad, plain.module.embedding.weight.grad
    assert ours.is_sparse and torch.allclose(ours.to_dense(), theirs.to_dense())
    error = model.module.dense.weight.grad - plain.module.dense.weight.grad
    assert error.norm() <= 1e-3 * plain.module.dense.weight.grad.norm()
    dense = sum(p.numel() for p in model.module.dense.parameters())
    assert quantizer.meter.total().float32_bytes == allreduce_bytes(4 * dense, dist.get_world_size())
    assert quantizer.meter.total().saved_fraction > 0


@pytest.mark.parametrize("bits", [4, 32])
def test_complex_gradients_travel_as_they_are(bits):
    """Torch lists them as real ones of half their length."""
    plain = DistributedDataParallel(Linear(dtype=torch.complex64))
    model, quantizer = distributed(bits, module=Linear(dtype=torch.complex64))
    for seed in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(seed).backward()
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            assert theirs.imag.any()
            torch.testing.assert_close(ours, theirs)
    assert quantizer.meter.total().sent_bytes >= 3 * 8 * sum(Linear.SIZES)


def test_what_is_frozen_after_the_model_was_wrapped():
    """Its bucket still comes, with zeros."""
    module = Linear()
    model = DistributedDataParallel(module, bucket_cap_mb=0.01, find_unused_parameters=True)
    module.values[1].requires_grad_(False)
    ddp.compress(model, 16, block_size=64)
    for seed in range(3):
        model.zero_grad()
        model(seed).backward()
        assert module.values[1].grad is None or not module.values[1].grad.any()
        left = [0, 2, 3]
        assert_means([module.values[i].grad for i in left], [module.mean(seed)[i] for i in left], 16)


def test_ranks_that_have_no_more_data(rank, size):
    """`join`: they take part with zeros."""
    model, _ = distributed(16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    with model.join():
        for seed in range(2 + rank):
            optimizer.zero_grad()
            model(seed).backward()
            optimizer.step()
    assert same_on_all_ranks([value for value in model.module.values])


def test_under_autocast():
    torch.manual_seed(0)
    plain = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    torch.manual_seed(0)
    model, _ = distributed(16, module=nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
    batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(dist.get_rank()))
    for each in (plain, model):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = each(batch).float().square().mean()
        loss.backward()
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert ours.dtype is torch.float32 and (ours - theirs).norm() <= 1e-3 * theirs.norm()


def test_the_model_is_left_to_the_garbage_collector():
    model, quantizer = distributed(4)
    model(0).backward()
    kept = [weakref.ref(model), weakref.ref(quantizer)]
    del model, quantizer
    until = time.monotonic() + 10
    while any(ref() for ref in kept) and time.monotonic() < until:  # the thread that has ended the step may still end
        gc.collect()
        time.sleep(0.01)
    assert [ref() for ref in kept] == [None, None]
    assert ddp.transport() is ddp.transport()


def test_ranks_with_different_hierarchical_all_hear_of_it(rank, size):
    """Where that makes a difference, before anything is sent; and the model can still be compressed."""
    if not os.environ.get("HVD_DYNCOMP_TEST_RANKS_PER_HOST"):
        pytest.skip("all ranks are on one host")
    model = DistributedDataParallel(Linear())
    with pytest.raises(LockstepError, match="give hierarchical= the same value on every rank"):
        ddp.compress(model, 16, hierarchical=False if rank == size - 1 else None)
    ddp.compress(model, 16, block_size=64)
    model(0).backward()
    assert_means(gradients(model), model.module.mean(0), 16)
