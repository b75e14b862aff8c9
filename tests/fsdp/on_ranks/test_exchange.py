"""What a backward pass makes of the gradients of a model that FSDP2 shards."""

import copy
import functools
import io

import pytest
import torch
import torch.distributed as dist
from sharded import (
    DEVICE,
    Blocks,
    Checkpointed,
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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from hvd_dyncomp import AllRanks, Controller, Schedule, fsdp, less_momentum

pytestmark = pytest.mark.promise(
    "FSDP2: exchanging modules one by one gives the same means as exchanging them together."
)


@pytest.mark.parametrize("bits", [2, 4, 8, 16, 32])
def test_gradients_become_means_of_all_ranks(bits):
    whole, model, quantizer = compressed(bits, error_feedback=False)
    for seed in range(3):
        a_step(model, seed)
        assert_means(model, means(whole, seed), bits)
    sent = quantizer.meter.total()
    assert sent.steps == 3 and (sent.saved_fraction > 0) == (bits != 32)


@pytest.mark.parametrize("bits", [0.25, 4, 8])  # at which no gradient is so small that its block drops a residual
def test_what_is_not_delivered_is_in_the_residuals(bits, size):
    """Over steps, for each value: sum of means * replicas == sum of gradients - residuals of all replicas.

    Of the same gradients in every step: where those of a block get smaller, a part of its residual is cut.
    """
    whole, model, quantizer = compressed(bits, min_numel=1, hierarchical=False)
    replicas = mesh()["replicate"]
    reference = sharded(whole)  # whose shards of the mean are exact, by 32 bits
    fsdp.attach(reference, 32)
    wanted = a_step(reference, 0)
    owed = {name: torch.zeros(each.shape, dtype=torch.float64) for name, each in wanted.items()}
    for _ in range(4):
        for name, found in a_step(model, 0).items():
            owed[name] += replicas.size() * (wanted[name] - found).double().cpu()
    for name, kept in undelivered(quantizer).items():
        total = owed[name]
        dist.all_reduce(kept, group=replicas.get_group())
        assert (kept - total).abs().max() <= 1e-3 + 4 * 2.0**-6 * kept.abs().max(), name


def undelivered(quantizer):
    """What this rank carries of each parameter: its own residual, and that of the part whose sum it quantizes."""
    state = quantizer.state_dict()
    kept = {name: residual.double() for name, residual in state["residuals"].items()}
    for bucket in quantizer._plan.buckets:
        for slot in bucket.slots:
            if slot.name in kept and bucket.section.sharded:
                own = torch.zeros(bucket.blocks * bucket.block_size, dtype=torch.float64)
                own[bucket.residuals.shard_range] = state["shard_residuals"][bucket.name]["values"].double()
                kept[slot.name] += own[slot.range].view(kept[slot.name].shape)
    return kept


@pytest.mark.parametrize(
    "sharding",
    [
        {"reshard_after_forward": False},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    ],
    ids=["not resharded", "bfloat16 sums", "bfloat16 layers", "float16 sums", "float64 sums", "offloaded"],
)
@pytest.mark.parametrize("bits", [8, 32])
def test_ways_to_shard(sharding, bits):
    whole, model, _ = compressed(bits, sharding=sharding, error_feedback=False)
    policy = sharding.get("mp_policy")
    coarse = policy is not None and {policy.param_dtype, policy.reduce_dtype} & {torch.bfloat16, torch.float16}
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(whole, seed), 8 if coarse else bits)


def test_means_add_up():
    whole, model, quantizer = compressed(16)
    expected = [means(whole, seed) for seed in range(3)]
    for seed in range(3):
        loss_of(model, seed, dist.get_rank()).backward()
    assert_means(model, {name: sum(each[name] for each in expected) for name in expected[0]}, 16)
    assert quantizer.meter.total().steps == 3


def test_sums_that_fsdp_divides_afterwards():
    whole, model, _ = compressed(16)
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)
    a_step(model, 0)
    assert_means(model, means(whole, 0), 16)


def test_a_module_that_the_loss_uses_twice():
    def twice(model, seed, rank):
        return loss_of(model, seed, rank) + loss_of(model, seed + 50, rank)

    whole, model, quantizer = compressed(16)
    for seed in range(2):
        a_step(model, seed, twice)
        assert_means(model, means(whole, seed, twice), 16)
    assert quantizer.meter.total().steps == 2


def test_where_no_backward_pass_of_autograds_ends(monkeypatch):
    """As with schedules of pipelines, which call FSDP by themselves."""
    monkeypatch.setattr("hvd_dyncomp.fsdp.quantizer.call_at_end", lambda function: False)
    whole, model, _ = compressed(16)
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(whole, seed), 16)


def test_modules_that_a_step_does_not_use():
    def some(model, seed, rank):
        return loss_of(model, seed, rank, order=[[0, 2], [2], [1, 0]][seed])

    whole, model, quantizer = compressed(16)
    for seed in range(3):
        a_step(model, seed, some)
        assert_means(model, means(whole, seed, some), 16)


def test_a_model_that_has_computed_before():
    """Without a backward pass FSDP leaves whole parameters in it."""
    torch.manual_seed(0)
    whole = Blocks()
    model = sharded(whole)
    with torch.no_grad():
        loss_of(model, 0, 0)
    fsdp.attach(model, 16)
    a_step(model, 0)
    assert_means(model, means(whole, 0), 16)


def test_frozen_parameters():
    whole, model, _ = compressed(16)
    for seed, frozen in enumerate([(), ("first.weight", "blocks.1.0.bias"), ("last.bias",), ()]):
        for each in (whole, model):
            for name, parameter in each.named_parameters():
                parameter.requires_grad_(name not in frozen)
            each.zero_grad()
        a_step(model, seed)
        assert_means(model, means(whole, seed), 16)


def test_unused_parameters_of_a_module_need_fsdps_zeros():
    torch.manual_seed(0)
    whole, model, _ = compressed(16, whole=WithUnused())
    model.set_reduce_scatter_unused_params(True)
    a_step(model, 0)
    expected = {name: torch.zeros_like(each) for name, each in whole.named_parameters()}
    assert_means(model, expected | means(whole, 0), 16)


class Compiled(Blocks):
    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.compile(backend="aot_eager")


@pytest.mark.parametrize("kind", [Checkpointed, Compiled])
def test_what_else_is_done_to_blocks(kind):
    torch.manual_seed(0)
    whole, model, _ = compressed(16, whole=kind())
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(whole, seed), 16)


def test_clipped_steps_leave_replicas_equal(rank):
    whole, model, quantizer = compressed(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3):
        a_step(model, seed)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        norms = [None] * dist.get_world_size()
        dist.all_gather_object(norms, norm.full_tensor().item())
        assert len(set(norms)) == 1
    assert same_on_replicas({name: each.to_local() for name, each in model.named_parameters()})
    quantizer.check_replicas()
    assert quantizer.controller.step({"train_loss": float(rank)}) == 4


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_momentum_is_left_out_of_shards(kind):
    """As where nothing is sharded: with the same gradients, the same steps; also of a block that was frozen before."""
    new = {
        "sgd": functools.partial(torch.optim.SGD, lr=0.01, momentum=0.9),
        "adam": functools.partial(torch.optim.AdamW, lr=0.01),
    }[kind]
    torch.manual_seed(0)
    whole = Blocks()
    model = sharded(whole)
    optimizer, reference = less_momentum(new(model.parameters())), new(whole.parameters())
    for group in reference.param_groups:
        if kind == "sgd":
            group.update(momentum=0.0, lr=0.1)
        else:
            group["betas"] = (0.0, group["betas"][1])
    schedule = Controller(Schedule({0: 0.25, 2: 8}))
    model.blocks[0].requires_grad_(False)
    quantizer = fsdp.attach(model, schedule, min_numel=1)
    model.blocks[0].requires_grad_(True)
    a_step(model, 9)  # which shows where gradients lie, and compresses none
    for seed in range(2):
        a_step(model, seed)
        for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
            theirs.grad = ours.grad.full_tensor().cpu()
        optimizer.step()
        reference.step()
        for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.full_tensor().cpu(), theirs.data, msg=name, rtol=1e-5, atol=1e-6)
        quantizer.controller.step({})
    a_step(model, 2)
    assert quantizer.bits == 8 and not optimizer.left


def test_optimizers_that_step_within_backward():
    """The level at which their own gradients came decides."""
    torch.manual_seed(0)
    model = sharded(Blocks())
    levels = Controller(Schedule({0: 8, 1: 1, 2: 8}))
    quantizer = fsdp.attach(model, levels, min_numel=1)
    optimizers, left_out = {}, []

    def step(parameter):
        left_out.append(parameter in optimizers[parameter].left)
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        optimizers[parameter] = less_momentum(torch.optim.SGD([parameter], lr=0.01, momentum=0.9))
        parameter.register_post_accumulate_grad_hook(step)
    for seed, expected in enumerate((False, True, False)):
        left_out.clear()
        loss_of(model, seed, dist.get_rank()).backward()
        assert left_out == [expected] * len(optimizers)
        with torch.inference_mode():
            quantizer.controller.step({})
    quantizer.check_replicas()


def test_tensors_may_be_parallel_within_a_replica(size):
    """Two replicas of two ranks that share each layer's tensors, and no shards."""
    if size != 4:
        pytest.skip("needs four ranks")
    names, override = ("replicate", "shard", "tensor"), {"replicate": "hvd_dyncomp"}
    dimensions = init_device_mesh(DEVICE, (2, 1, 2), mesh_dim_names=names, backend_override=override)
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(31, 64), nn.LayerNorm(64), nn.Tanh(), nn.Linear(64, 3))
    model = copy.deepcopy(whole).to(DEVICE)
    parallelize_module(model, dimensions["tensor"], {"0": ColwiseParallel(output_layouts=Replicate())})
    fully_shard(model, mesh=dimensions["replicate", "shard"])
    quantizer = fsdp.attach(model, 16, min_numel=1, block_size=64)
    replica = dimensions["replicate"].get_local_rank()
    for seed in range(2):
        model.zero_grad()
        loss_of(model, seed, replica).backward()
        whole.zero_grad()
        (sum(loss_of(whole, seed, each) for each in range(2)) / 2).backward()
        for (name, ours), theirs in zip(model.named_parameters(), whole.parameters(), strict=True):
            error = (ours.grad.full_tensor().cpu() - theirs.grad).norm()
            assert error <= 2e-3 * theirs.grad.norm(), name
    quantizer.controller.step({})
    state = AllRanks(quantizer).state_dict()
    mine = quantizer.state_dict()
    assert mine["shard"] == [dimensions["tensor"].get_local_rank(), 2]
    AllRanks(quantizer).load_state_dict(state)
    again = quantizer.state_dict()["residuals"]
    assert all(torch.equal(again[name], residual) for name, residual in mine["residuals"].items())


def test_the_states_of_all_ranks_are_one(rank, caplog):
    """With other replicas or other shards, residuals begin at zero."""
    _, model, quantizer = compressed(1, hierarchical=False)
    for seed in range(3):
        a_step(model, seed)
    mine = quantizer.state_dict()["residuals"]
    state = AllRanks(quantizer).state_dict()
    assert any(residual.any() for residual in mine.values())
    a_step(model, 3)
    AllRanks(quantizer).load_state_dict(state)
    again = quantizer.state_dict()["residuals"]
    assert all(torch.equal(again[name], residual) for name, residual in mine.items())

    replicas = mesh()["replicate"].get_group()
    shards = dist.get_world_size() // replicas.size()
    AllRanks(quantizer).load_state_dict({**state, "ranks": state["ranks"][:shards]})  # of the first replica
    assert ("residuals begin at zero" in caplog.text) == (rank == 0)
    assert not any(residual.any() for residual in quantizer.state_dict()["residuals"].values())
    caplog.clear()

    others = []
    for each in state["ranks"]:
        file = io.BytesIO(each.numpy().tobytes())
        others.append(packed({**torch.load(file, weights_only=True), "shard": [0, 99]}))
    AllRanks(quantizer).load_state_dict({**state, "ranks": others})
    assert ("residuals begin at zero" in caplog.text) == (rank == 0)
    assert not any(residual.any() for residual in quantizer.state_dict()["residuals"].values())
    a_step(model, 4)


def packed(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def test_a_saved_state_continues_bit_for_bit(rank):
    _, model, quantizer = compressed(1)
    a_step(model, 0)
    state = copy.deepcopy(quantizer.state_dict())
    expected = [{name: each.clone() for name, each in a_step(model, seed).items()} for seed in (1, 2)]
    _, model, quantizer = compressed(1)
    quantizer.load_state_dict(state)
    for seed, wanted in zip((1, 2), expected, strict=True):
        found = a_step(model, seed)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    with pytest.raises(ValueError, match=r"state was saved (for shard|on rank)"):
        everyone = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, state)
        quantizer.load_state_dict(everyone[rank - 1])
