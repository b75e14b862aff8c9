"""Models whose units have one mesh of replicas and shards (HSDP): as torch's own, with and without accumulation."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from sharded import (
    Blocks,
    Checkpointed,
    a_step,
    assert_close,
    assert_means,
    compressed,
    gradients,
    loss_of,
    means,
    mesh,
    same_on_replicas,
    sharded,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from hvd_dyncomp import LockstepError

pytestmark = pytest.mark.promise("FSDP2: HSDP has the means of torch's own all-reduce, also after accumulation.")

# What a pass does with its gradients: keeps them whole, adds them up in the shards, or averages all that there are.
WHOLE, SHARDS, MEANS = "whole", "shards", "means"


def set_pass(model, kind):
    model.set_requires_gradient_sync(kind != WHOLE)
    model.set_requires_all_reduce(kind == MEANS)


def step_of(model, passes, loss=loss_of, first=0):
    """Several passes, each of other inputs."""
    model.zero_grad()
    for seed, kind in enumerate(passes, start=first):
        set_pass(model, kind)
        loss(model, seed, dist.get_rank()).backward()


def torchs_own(whole, **sharding):
    """The same model in float64, as torch's HSDP averages it."""
    return sharded(copy.deepcopy(whole).double(), **{"mesh": mesh(backend=None), **sharding})


@pytest.mark.parametrize("bits", [2, 16, 32])
def test_gradients_become_means(bits):
    whole, model, quantizer = compressed(bits, error_feedback=False)
    for seed in range(2):
        a_step(model, seed)
        assert_means(model, means(whole, seed), bits)
    assert quantizer.meter.total().steps == 2 and (quantizer.meter.total().saved_fraction > 0) == (bits != 32)


class Tied(Blocks):
    """One parameter in two places of a unit."""

    def __init__(self):
        super().__init__()
        self.also = nn.Linear(31, 65)
        self.also.weight = self.first.weight

    def forward(self, inputs, order=range(3)):
        return super().forward(inputs, order) + self.last(self.also(inputs))


FLOAT32_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WAYS = {  # how it is made, how it is sharded, and the level that its sums are worth at most
    "default": (Blocks, {}, 16),
    "tied": (Tied, {}, 16),
    "nested": (Blocks, {"nested": True}, 16),
    "checkpointed": (Checkpointed, {}, 16),
    "not resharded": (Blocks, {"reshard_after_forward": False}, 16),
    "offloaded": (Blocks, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, 16),
    "bfloat16 layers": (Blocks, {"mp_policy": FLOAT32_SUMS}, 8),
    "bfloat16 sums": (Blocks, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)}, 8),
    "float16 sums": (Blocks, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float16)}, 8),
}


@pytest.mark.parametrize("way", WAYS)
def test_passes_add_up_before_the_last_one(way):
    """Two steps, each of passes of all three kinds; the second begins where nothing is left over."""
    kind, sharding, bits = WAYS[way]
    torch.manual_seed(0)
    whole, model, quantizer = compressed(16, whole=kind(), sharding=sharding, error_feedback=False)
    reference = torchs_own(whole)
    for first in (0, 3):
        for each in (model, reference):
            step_of(each, [SHARDS, WHOLE, MEANS], first=first)
        assert_close(model, reference, bits)
    assert quantizer.meter.total().steps == 2


@pytest.mark.parametrize(
    "passes", [[SHARDS, MEANS], [WHOLE, MEANS], [WHOLE, SHARDS, SHARDS, MEANS], [MEANS, SHARDS, MEANS], [SHARDS, WHOLE]]
)
def test_passes_of_any_kind_in_any_order(passes):
    """What a last pass leaves over is part of the next step, as with torch's own."""
    whole, model, _ = compressed(32)
    reference = torchs_own(whole)
    for each in (model, reference):
        step_of(each, passes)
        if passes[-1] != MEANS:
            assert not gradients(each)
            set_pass(each, MEANS)
            loss_of(each, 9, dist.get_rank()).backward()
    assert_close(model, reference, 32)


def of_replica(orders, model, seed, rank):
    """The loss of a model of which each replica uses some blocks, in an order of its own in each pass."""
    replica = mesh()["replicate"].get_local_rank()
    return loss_of(model, seed, rank, order=orders[seed][min(replica, 1)])


@pytest.mark.parametrize(
    "orders",
    [
        [([0, 1, 2], [2]), ([1, 0], [0, 1]), ([0, 2], [0, 2])],  # the replicas skip others before the last pass
        [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 1, 2]), ([1], [1])],  # and all of them some in the last one
    ],
)
@pytest.mark.parametrize("first", [SHARDS, WHOLE])
def test_modules_that_some_passes_skip(orders, first):
    """In those before the last one each replica as it likes. What waits in a module comes when it is used next."""
    whole, model, _ = compressed(32)
    reference = torchs_own(whole)
    loss = functools.partial(of_replica, orders)
    for each in (model, reference):
        step_of(each, [first, SHARDS, MEANS], loss)
        loss_of(each, 8, dist.get_rank()).backward()
    assert_close(model, reference, 32)


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
def test_a_module_that_one_replica_skips_in_the_last_pass(rank, size):
    _, model, _ = compressed(4)
    loss = functools.partial(of_replica, [([0, 1, 2], [0, 1, 2]), ([0, 1, 2], [0, 2])])
    with pytest.raises(LockstepError, match=r"rank 0 has module blocks\.1, rank . has blocks\.0"):
        step_of(model, [SHARDS, MEANS], loss)


def test_what_frameworks_see_stays(rank):
    """Placements, states and optimizers are as torch's own: a checkpoint goes from one to the other and back."""
    whole, model, quantizer = compressed(8)
    reference = sharded(whole, mesh=mesh(backend=None))
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference))
    for each, optimizer in ((model, ours), (reference, theirs)):
        for first in (0, 2):
            step_of(each, [SHARDS, MEANS], first=first)
            nn.utils.clip_grad_norm_(each.parameters(), 0.5)
            optimizer.step()
    for each in model.parameters():
        assert each.placements == each.grad.placements == (Replicate(), Shard(0))
        assert each.device_mesh == each.grad.device_mesh == mesh()
    assert same_on_replicas({name: each.to_local() for name, each in model.named_parameters()})
    quantizer.check_replicas()
    mine, its = get_state_dict(model, ours), get_state_dict(reference, theirs)
    for one, other in zip(mine, its, strict=True):
        assert layout(one) == layout(other)
    set_state_dict(reference, theirs, model_state_dict=mine[0], optim_state_dict=mine[1])
    for (name, each), parameter in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(each.to_local(), parameter.to_local()), name


def layout(state):
    """What a state has, but for values."""
    if isinstance(state, dict):
        return {name: layout(each) for name, each in state.items()}
    if isinstance(state, torch.Tensor):
        placements = (state.placements, state.to_local().shape) if hasattr(state, "placements") else None
        return state.shape, state.dtype, placements
    return state


def test_settings_that_change_after_compress():
    """FSDP looks at its mesh again."""
    whole, model, _ = compressed(16)
    reference = torchs_own(whole)
    for change in (True, False):
        model.set_reshard_after_forward(change)
        for each in (model, reference):
            step_of(each, [SHARDS, MEANS])
        assert_close(model, reference, 16)


def divide_by(model, factor, in_sums):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(in_sums)  # Gloo cannot multiply first


@pytest.mark.parametrize("in_sums", [True, False])
def test_programs_that_divide_by_a_number_of_their_own(in_sums):
    """As by all tokens of a step: FSDP then divides by a factor, and sums over replicas."""
    whole, model, _ = compressed(16)
    reference = torchs_own(whole)
    for each in (model, reference):
        divide_by(each, 1.0 if in_sums else float(mesh()["shard"].size()), in_sums)
        step_of(each, [SHARDS, MEANS])
    assert_close(model, reference, 16)
