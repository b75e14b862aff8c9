"""Every error reaches all ranks, in words, and none of them hangs or trains on."""

import contextlib
import re

import pytest
import torch
import torch.distributed as dist
from sharded import Blocks, WithUnused, a_step, compressed, loss_of, mesh, sharded
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import Controller, LockstepError, Static, ddp, fsdp
from hvd_dyncomp.fsdp import units

# What the others hear of a rank's error before it greets.
LEFT = r"rank . cannot use its quantizer: "


@contextlib.contextmanager
def on_all(odd: int, kind: type, text: str):
    """The odd rank has an error of its own, and the others hear of it."""
    mine = dist.get_rank() == odd
    with pytest.raises(kind if mine else LockstepError) as caught:
        yield
    assert re.search(text, str(caught.value)), caught.value
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, "")  # all have come here


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


def with_other_replicas() -> nn.Module:
    size = dist.get_world_size()
    return sharded(blocks(), mesh=init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard")))


def without_shards() -> nn.Module:
    ranks = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("replicate", "tensor"))
    return fully_shard(
        distribute_module(blocks(), ranks), mesh=ranks, dp_mesh_dims=DataParallelMeshDims(replicate="replicate")
    )


def partly_without_replicas() -> nn.Module:
    model = blocks()
    fully_shard(model.blocks[1], mesh=mesh()["shard"])
    return fully_shard(model, mesh=mesh())


def without_root() -> nn.Module:
    model = blocks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh()["shard"])
    return model


def on_two_meshes() -> nn.Module:
    model = blocks()
    fully_shard(model.blocks[1], mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return fully_shard(model, mesh=mesh()["shard"])


def hooked() -> nn.Module:
    model = sharded(blocks())
    model.blocks[1].set_all_reduce_hook(lambda shard: None)
    return model


def replicated() -> nn.Module:
    return replicate(blocks(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return sharded(Blocks())


@pytest.mark.promise("If `compress` fails on one rank, every rank raises an error.")
@pytest.mark.parametrize(
    ("model", "kind", "text"),
    [
        (blocks, TypeError, "model must be a module that torch's fully_shard was applied to, got Blocks"),
        (lambda: DistributedDataParallel(blocks()), TypeError, "for DistributedDataParallel there is"),
        (lambda: "x", TypeError, "model must be a module"),
        (replicated, TypeError, r"made by torch's replicate, which calls no communication hook: wrap .* mesh \(N, 1\)"),
        (with_other_replicas, ValueError, r"leave replicas= out.* got replicas on ranks \[1, 3\]"),
        (without_shards, ValueError, r"\(the model\) was given a mesh of replicas only"),
        (partly_without_replicas, ValueError, r"\(the model\) and blocks.1 have meshes of other ranks or dimensions"),
        (without_root, ValueError, "parameter first.weight is not sharded, so its gradient would not be averaged"),
        (on_two_meshes, ValueError, r"\(the model\) and blocks.1 have meshes of other ranks or dimensions"),
        (hooked, ValueError, "blocks.1 already has an all-reduce hook"),
        (on_meta, ValueError, "has parameters on the meta device"),
    ],
)
def test_models_that_cannot_be_compressed(model, kind, text, size):
    odd, good = model(), sharded(blocks())
    with on_all(size - 1, kind, text):
        fsdp.compress(odd if dist.get_rank() == size - 1 else good, 4, replicas=mesh()["replicate"])
    fsdp.compress(good, 4, replicas=mesh()["replicate"])  # it is as before


@pytest.mark.promise("If `compress` fails on one rank, every rank raises an error.")
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (
            {"replicas": None},
            ValueError,
            "replicas is missing, and the mesh .* has shards only: give",
        ),
        ({"replicas": 3}, TypeError, "replicas must be a process group or a mesh of one dimension, got 3"),
        ({"replicas": "two"}, ValueError, "replicas must be a mesh of one dimension, such as"),
        ({"replicas": "others"}, ValueError, "replicas must have this process, rank 0 of all, as a member"),
        ({"discardable": True}, TypeError, "compress no longer takes discardable: leave it out"),
        ({"block_size": 3}, ValueError, "block_size"),
        ({"nonsense": 3}, TypeError, "fsdp.compress takes no argument nonsense"),
        ({"optimizer": 3}, TypeError, "fsdp.compress takes no argument optimizer"),
        ({"controller": "x"}, TypeError, "controller must be a Controller, a Policy or a level"),
        ({"skip": lambda name, parameter: 1 / 0}, ZeroDivisionError, "division by zero"),
    ],
)
def test_bad_arguments(arguments, kind, text, rank, size):
    meshes = mesh()
    arguments = dict(arguments)
    if arguments.get("replicas") == "two":
        arguments["replicas"] = meshes
    elif arguments.get("replicas") == "others":
        arguments["replicas"] = dist.new_group([size - 1])
    model = sharded(blocks())
    with on_all(0, kind, text):
        fsdp.compress(model, **{"controller": 4, "replicas": meshes["replicate"], **(arguments if rank == 0 else {})})
    fsdp.compress(model, 4, replicas=meshes["replicate"])


def test_a_model_with_gradients_that_wait():
    """On all ranks, as a pass of one alone would wait for the others."""
    model = sharded(blocks(), mesh=mesh())
    model.set_requires_all_reduce(False)
    a_step(model, 0)
    with pytest.raises(ValueError, match=r"has gradients of a backward pass that have not been averaged"):
        fsdp.compress(model, 4)
    model.set_requires_all_reduce(True)
    a_step(model, 1)
    fsdp.compress(model, 4, replicas=mesh()["replicate"])  # which its mesh has, too


def test_replicas_that_are_shards(size):
    if size != 4:
        pytest.skip("needs shards")
    with pytest.raises(ValueError, match="replicas must connect ranks with the same shard"):
        fsdp.compress(sharded(blocks()), 4, replicas=mesh()["shard"])
    crossed = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])[0]
    with pytest.raises(LockstepError, match="its rank 0 has shard . of 2, its rank 1 .* of 2"):
        fsdp.compress(sharded(blocks()), 4, replicas=crossed)


def of_first_shard(size: int) -> set[int]:
    """The ranks that have it."""
    return {0, 2} if size == 4 else set(range(size))


def assert_left(model, text: str, seed: int = 7) -> None:
    """Every further step says why there is none."""
    for _ in range(2):
        with pytest.raises((RuntimeError, LockstepError), match=text):
            a_step(model, seed)


def test_replicas_that_begin_unequal(rank, size):
    whole = blocks()
    with torch.no_grad():
        whole.blocks[1][0].weight[40] += rank  # in the first shard only
    _, model, _ = compressed(4, whole=whole)
    if rank in of_first_shard(size):
        with pytest.raises(
            LockstepError, match=r"values of blocks.1.0.weight, as a checksum, .*load the same checkpoint"
        ):
            a_step(model, 0)
    else:
        a_step(model, 0)


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
def test_other_levels(rank, size):
    odd = rank == size - 1
    controller = Controller(Static(8 if odd else 4), transport=ddp.transport())
    _, model, _ = compressed(controller)
    if size == 4 and rank in of_first_shard(size):  # both at 4 bits
        a_step(model, 0)
        return
    with pytest.raises(LockstepError, match="rank 0 has bits 4, rank . has 8"):
        a_step(model, 0)


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
def test_other_steps(rank, size):
    _, model, quantizer = compressed(4)
    state = quantizer.state_dict()
    a_step(model, 0)
    if rank >= size // 2:  # all shards of a replica
        quantizer.load_state_dict(state)
    with pytest.raises(LockstepError, match="has step 1, rank . has 0"):
        a_step(model, 1)
    assert_left(model, "was interrupted by LockstepError|cannot use its quantizer")


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
def test_replicas_that_go_through_other_modules(rank, size):
    """As with layers that are dropped at random, by another seed in each replica."""
    _, model, _ = compressed(4)
    a_step(model, 0)
    other = rank >= size // 2
    with pytest.raises(LockstepError, match=r"rank 0 has module blocks\.\d, rank . has blocks\.\d"):
        a_step(model, 1, lambda *args: loss_of(*args, order=[0, 1] if other else [0, 2]))


def test_parameters_without_a_gradient():
    torch.manual_seed(0)
    _, model, _ = compressed(4, whole=WithUnused())
    with pytest.raises(RuntimeError, match=r"some parameters of \(the model\) have no gradient"):
        a_step(model, 0)
    assert_left(model, "was interrupted by .*RuntimeError")


@pytest.mark.promise("FSDP2: a gradient that would not be a mean raises an error.")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda model: model.set_requires_all_reduce(False), r"use set_requires_gradient_sync\(False\) to accumulate"),
        (lambda model: model.blocks[0].set_gradient_divide_factor(2.0), "scale the loss instead"),
    ],
)
def test_settings_that_would_bend_means(change, text, rank, size):
    """On the shards of one replica."""
    _, model, _ = compressed(4)
    a_step(model, 0)
    odd = rank < max(1, size // 2)
    if odd:
        change(model)
    with pytest.raises(ValueError if odd else LockstepError, match=text if odd else f"{LEFT}.*{text}"):
        a_step(model, 1)


@pytest.mark.promise("FSDP2: a gradient that would not be a mean raises an error.")
def test_a_torch_that_averages_by_itself(rank):
    """If FSDP does not ask the group that it was given."""
    _, model, quantizer = compressed(4, hybrid=True)
    a_step(model, 0)
    unit = quantizer._units[0]
    unit._group.mesh_info.replicate_process_group = unit.replica_group
    with pytest.raises(RuntimeError, match=rf"FSDP itself .* torch {re.escape(torch.__version__)} does not use"):
        a_step(model, 1)


@pytest.mark.promise("FSDP2: a gradient that would not be a mean raises an error.")
def test_a_gradient_that_is_changed_in_backward(rank, size):
    """By something that runs where backward ends, before the means are there."""
    _, model, _ = compressed(4)
    with pytest.raises(RuntimeError, match="the gradient of last.weight is not in the memory that FSDP passed"):
        loss = loss_of(model, 0, rank)
        taken = fsdp.Quantizer._at_end

        def first(self):
            model.last.weight.grad = None
            taken(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp.Quantizer, "_at_end", first)
            loss.backward()


@pytest.mark.parametrize("hybrid", [False, True])
def test_an_exception_in_one_ranks_hook(hybrid, rank, size, monkeypatch):
    """Of a program's own, before the unit's step: the others hear of it, in the same step."""
    _, model, _ = compressed(4, hybrid=hybrid)
    a_step(model, 0)
    if hybrid:
        model.set_requires_all_reduce(False)
        a_step(model, 2)
        model.set_requires_all_reduce(True)
    if rank == size - 1:
        taken, calls = units.Unit.gradients, []

        def fails(self, flat):
            calls.append(self)
            if len(calls) == 2:
                raise MemoryError("no more")
            return taken(self, flat)

        monkeypatch.setattr(units.Unit, "gradients", fails)
    if size == 4 and rank in of_first_shard(size):  # the others have an error
        a_step(model, 1)
        return
    expected = (MemoryError, "no more") if rank == size - 1 else (LockstepError, f"{LEFT}no more")
    with pytest.raises(expected[0], match=expected[1]):
        a_step(model, 1)


@pytest.mark.parametrize("averages", [True, False])
def test_an_exception_in_the_middle_of_backward(averages):
    """On all ranks; FSDP itself does not go on after it, and neither do means that nobody has."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("in the middle")

    _, model, quantizer = compressed(4, hybrid=True)
    model.set_requires_all_reduce(averages)
    hidden = Raises.apply(model.blocks[0](torch.randn(4, 65, requires_grad=True)))
    with pytest.raises(KeyError):
        model.blocks[1](hidden).sum().backward()
    with pytest.raises(RuntimeError, match="between steps"):
        quantizer.state_dict()


def test_shards_that_part_are_noticed_in_the_next_epoch(rank, size):
    """By the replicas of the same shard, in the greeting of the first unit, whichever has parted."""
    _, model, quantizer = compressed(4)
    for seed in range(2):
        a_step(model, seed)
        quantizer.controller.step({})
    if rank == max(of_first_shard(size)):
        with torch.no_grad():
            model.blocks[0][0].weight.to_local()[3] += 1
    text = "parameter blocks.0.0.weight is not the same on rank 0 and rank 1; 1 of"
    with pytest.raises(LockstepError, match=text) if rank in of_first_shard(size) else contextlib.nullcontext():
        a_step(model, 2)
