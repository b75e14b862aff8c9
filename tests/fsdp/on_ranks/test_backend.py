"""The backend by itself: models that nobody attaches, `replicate`, several meshes, and what passes through."""

import copy
import functools
import gc

import pytest
import torch
import torch.distributed as dist
from sharded import (
    BOUNDS,
    Blocks,
    WithUnused,
    a_step,
    assert_means,
    compressed,
    loss_of,
    means,
    mesh,
    same_on_replicas,
    sharded,
)
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hvd_dyncomp import LockstepError, PerRank, fsdp

pytestmark = pytest.mark.promise("FSDP2: HSDP has the means of torch's own all-reduce, also after accumulation.")


def mesh_of(*shape: int, bits: float = 16, axis: str = "replicate", **arguments) -> DeviceMesh:
    """A mesh whose groups have quantizers of their own, which nobody has used yet."""
    gc.collect()  # models of other tests that were attached
    fsdp.register_backend(bits, **{"block_size": 64, "min_numel": 1, **arguments})
    names = ("replicate", "shard")[: len(shape)]
    return init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override={axis: "hvd_dyncomp"})


def replicas_and_shards(size: int) -> tuple[int, int]:
    return (2, 2) if size == 4 else (size, 1)


def whole() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


@pytest.mark.parametrize("bits", [2, 16, 32])
def test_a_model_that_nobody_attaches(bits, size):
    reference, axes = whole(), mesh_of(*replicas_and_shards(size), bits=bits, error_feedback=False)
    model = sharded(reference, mesh=axes)
    for seed in range(3):
        a_step(model, seed)
        expected = means(reference, seed)
        if bits > 2:  # a unit has one level
            assert_means(model, expected, bits)
        else:
            found = torch.cat([each.grad.full_tensor().flatten() for each in model.parameters()])
            wanted = torch.cat([expected[name].flatten() for name, _ in model.named_parameters()])
            assert (found - wanted).norm() <= BOUNDS[bits] * wanted.norm()
    quantizer = axes.get_group("replicate").quantizer
    sent = quantizer.meter.total()
    assert sent.steps == 3 and (sent.saved_fraction > 0) == (bits != 32)
    assert quantizer.controller.step({}) == bits
    assert len(quantizer.state_dict()["units"]) == 4


def test_a_state_of_a_model_that_nobody_attaches(size):
    """Continues bit for bit, from the first step of the new run on."""
    axes = [mesh_of(*replicas_and_shards(size), bits=1) for _ in range(2)]
    models = [sharded(whole(), mesh=each) for each in axes]
    quantizers = [each.get_group("replicate").quantizer for each in axes]
    for seed in range(3):
        a_step(models[0], seed)
    PerRank(quantizers[1]).load_state_dict(PerRank(quantizers[0]).state_dict())
    assert any(each.any() for each in quantizers[1].state_dict()["residuals"].values())
    for seed in (3, 4):
        one, other = ({n: g.clone() for n, g in a_step(model, seed).items()} for model in models)
        assert all(torch.equal(one[name], other[name]) for name in one)
    one, other = (each.state_dict()["residuals"] for each in quantizers)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
def test_units_in_another_order(rank, size):
    model = sharded(whole(), mesh=mesh_of(*replicas_and_shards(size)))
    a_step(model, 0)
    odd = rank >= size // 2  # all shards of a replica
    model.last.requires_grad_(not odd)  # so the size of a unit is another one
    with pytest.raises(LockstepError, match=r"rank 0 has module all_reduce 1 of \d+ values, rank . has all_reduce"):
        a_step(model, 1)


@pytest.mark.parametrize("attached", [False, True])
def test_replicate(attached, size):
    """torch's DDP by the same means: whole models on all ranks."""
    axes, reference = mesh_of(size), whole()
    model = copy.deepcopy(reference)
    for module in (*model.blocks, model):
        replicate(module, mesh=axes)
    quantizer = fsdp.attach(model) if attached else axes.get_group("replicate").quantizer
    for seed in range(3):
        model.zero_grad()
        for last in (False, True):
            model.set_requires_all_reduce(last)
            loss_of(model, seed, dist.get_rank()).backward()
        expected = {name: 2 * each for name, each in means(reference, seed).items()}
        for name, each in model.named_parameters():
            found, error = each.grad.full_tensor(), 1e-3 if seed else 1e-5  # the first step is exact
            assert (found - expected[name]).norm() <= error * expected[name].norm() + 1e-6, name
    assert quantizer.meter.total().saved_fraction > 0
    if attached:
        quantizer.check_replicas()


def test_experts_with_a_mesh_of_their_own(size):
    """Some modules are sharded among others than the rest: each group of replicas has a quantizer."""
    if size != 4:
        pytest.skip("needs shards")
    few, many = mesh_of(*replicas_and_shards(size)), mesh_of(size, 1)
    reference = whole()
    model = copy.deepcopy(reference)
    fully_shard(model.blocks[1], mesh=many)
    fully_shard(model.blocks[0], mesh=few)
    fully_shard(model, mesh=few)
    quantizers = [fsdp.attach(model, replicas=each.get_group("replicate")) for each in (few, many)]
    for seed in range(3):
        a_step(model, seed)
        for name, mean in means(reference, seed).items():
            found = dict(model.named_parameters())[name].grad.full_tensor()
            assert (found - mean).norm() <= 1e-3 * mean.norm() + 1e-6, name
    assert [set(each.state_dict()["units"]) for each in quantizers] == [{"blocks.0", "(the model)"}, {"blocks.1"}]
    assert all(each.meter.total().saved_fraction > 0 for each in quantizers)
    assert quantizers[0].controller is not quantizers[1].controller


def test_a_mesh_that_is_made_of_another(size):
    """As torchtitan makes its meshes, by torch's own `_unflatten`."""
    mesh()  # of the same ranks: the group that is made last has the settings
    fsdp.register_backend(16)
    world, names = init_device_mesh("cpu", (size,), mesh_dim_names=("world",)), ("dp_replicate", "fsdp")
    override = {"dp_replicate": "hvd_dyncomp"}
    axes = world._unflatten(0, replicas_and_shards(size), names, backend_override=override)
    reference = whole()
    model = sharded(reference, mesh=axes["dp_replicate", "fsdp"])
    quantizer = fsdp.attach(model)
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(reference, seed), 16)
    assert quantizer.meter.total().saved_fraction > 0


def test_several_modules_in_one_call():
    """As torchtitan shards norm and output: every parameter has its own place."""
    reference = whole()
    model = copy.deepcopy(reference)
    fully_shard([model.first, model.last], mesh=mesh())
    fully_shard(model, mesh=mesh())
    quantizer = fsdp.attach(model, 16, block_size=64, min_numel=300)
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(reference, seed), 16)
    names = {name for unit in quantizer.state_dict()["units"].values() for name in unit["places"]}
    trained = {name for name, each in model.named_parameters() if each.to_local().numel()}
    assert names == trained


def test_parameters_that_a_step_does_not_use():
    """Where a module's gradients lie changes then: it is seen again, and means stay right."""
    torch.manual_seed(0)
    reference, model, quantizer = compressed(16, whole=WithUnused())
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(reference, seed), 16)
    for each in (reference, model):
        each.first.bias.requires_grad_(False)
    for seed in range(2, 4):
        a_step(model, seed)
        assert_means(model, means(reference, seed), 16)
    assert "first.bias" in quantizer.state_dict()["residuals"]


def test_small_and_skipped_parameters():
    """Small ones have 8 bits, skipped ones are exact. Without `attach` a unit has one level."""
    reference, model, _ = compressed(2, error_feedback=False, skip=lambda name, each: name.startswith("first"))
    for seed in range(2):
        a_step(model, seed)
    expected = means(reference, 1)
    for name, each in model.named_parameters():
        error = (each.grad.full_tensor() - expected[name]).norm() / expected[name].norm()
        assert error <= (1e-5 if name.startswith("first") else 0.02 if name.endswith("bias") else 0.9), (name, error)


@pytest.mark.promise("Everything but gradients passes through the backend as it is.")
def test_what_passes_through(rank, size):
    axes = mesh_of(*replicas_and_shards(size))
    group = axes.get_group("replicate")
    ranks = dist.get_process_group_ranks(group)
    for step in range(500):  # sums may hang where torch's own group is bypassed
        total = torch.full((4225,), float(rank + step), dtype=torch.float64)
        dist.all_reduce(total, group=group)
        assert total[-1] == sum(ranks) + step * len(ranks)
    most, count = torch.tensor([float(rank)]), torch.tensor([rank])
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(count, group=group)
    first, everyone = torch.tensor([rank]), [torch.zeros(1, dtype=torch.int64) for _ in ranks]
    dist.broadcast(first, ranks[0], group=group)
    dist.all_gather(everyone, torch.tensor([rank]), group=group)
    joined = torch.zeros(len(ranks), dtype=torch.int64)
    dist.all_gather_into_tensor(joined, torch.tensor([rank]), group=group)
    dist.barrier(group=group)
    objects = [None] * len(ranks)
    dist.all_gather_object(objects, rank, group=group)
    assert most == max(ranks) and count == sum(ranks) and first == ranks[0]
    assert [each.item() for each in everyone] == joined.tolist() == objects == list(ranks)
    assert group._quantizer is None  # nobody has asked it


class Sums(torch.autograd.Function):
    """Has integers, and a largest value, of all replicas in backward."""

    @staticmethod
    def forward(ctx, values, group):
        ctx.group = group
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        count, most = torch.ones(3, dtype=torch.int64), torch.tensor([float(dist.get_rank())])
        dist.all_reduce(count, group=ctx.group)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ctx.group)
        assert count[0] == ctx.group.size() and most == max(dist.get_process_group_ranks(ctx.group))
        return gradient, None


@pytest.mark.promise("Everything but gradients passes through the backend as it is.")
@pytest.mark.parametrize("attached", [False, True])
def test_what_passes_through_within_backward(attached, size):
    axes, reference = mesh_of(*replicas_and_shards(size)), whole()
    model = sharded(reference, mesh=axes)
    if attached:
        fsdp.attach(model)

    def loss(model, seed, rank):
        generator = torch.Generator().manual_seed(1000 * seed + rank)
        inputs, weights = torch.randn(16, 31, generator=generator), torch.randn(16, 3, generator=generator)
        outputs = model(inputs)
        return (
            (Sums.apply(outputs, axes.get_group("replicate")) if model is not reference else outputs) * weights
        ).sum()

    for seed in range(2):
        a_step(model, seed, loss)
        assert_means(model, means(reference, seed, functools.partial(loss)), 16)


def test_the_backend_on_the_axis_of_shards(size):
    """It has no gradients to average, and all else passes through."""
    axes, reference = mesh_of(1, size, axis="shard"), whole()
    model = sharded(reference, mesh=axes)
    a_step(model, 0)
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    for name, mean in means(reference, 0).items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad.full_tensor(), mean)
    assert norm.full_tensor() > 0


def test_clipped_steps_without_attach(size):
    axes = mesh_of(*replicas_and_shards(size), bits=2)
    model = sharded(whole(), mesh=axes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(4):
        a_step(model, seed)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert same_on_replicas({name: each.to_local() for name, each in model.named_parameters()})
