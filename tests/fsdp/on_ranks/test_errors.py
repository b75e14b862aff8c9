"""Every error reaches all ranks, in words, and none of them hangs or trains on."""

import contextlib
import functools
import re

import pytest
import torch
import torch.distributed as dist
from sharded import Blocks, a_step, compressed, loss_of, mesh, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import Controller, LockstepError, Static, ddp, fsdp
from hvd_dyncomp.fsdp.layout import Unit

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


@functools.cache
def other_mesh(axis: str) -> DeviceMesh:
    """Of all ranks, with the backend on one axis."""
    mesh()  # registers it
    shape = (dist.get_world_size(), 1) if axis == "replicate" else (1, dist.get_world_size())
    override = {axis: "hvd_dyncomp"}
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"), backend_override=override)


def blocks() -> Blocks:
    torch.manual_seed(0)
    return Blocks()


@functools.cache
def stock_mesh() -> DeviceMesh:
    """With replicas on neighbours, which no group of ours has."""
    ranks = torch.arange(dist.get_world_size()).view(-1, 2).t()
    return DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))


def without_backend() -> nn.Module:
    return sharded(blocks(), mesh=stock_mesh())


def without_root() -> nn.Module:
    model = blocks()
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    return model


def on_two_meshes() -> nn.Module:
    model = blocks()
    fully_shard(model.blocks[1], mesh=other_mesh("replicate"))
    return fully_shard(model, mesh=mesh())


def of_other_axis() -> nn.Module:
    return sharded(blocks(), mesh=other_mesh("shard"))


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
        (without_backend, ValueError, r"whose axis of replicas has the backend hvd_dyncomp: call .*register_backend"),
        (of_other_axis, ValueError, "whose axis of replicas has the backend hvd_dyncomp"),
        (without_root, ValueError, "parameter first.weight is not sharded, so its gradient would not be averaged"),
        (
            on_two_meshes,
            ValueError,
            r"\(the model\) and blocks.1 have replicas in different groups: call attach for each",
        ),
        (on_meta, ValueError, "is on the meta device; call attach after"),
    ],
)
def test_models_that_cannot_be_attached(model, kind, text, size):
    for axis in ("replicate", "shard"):  # made by all ranks
        other_mesh(axis)
    stock_mesh()
    good = sharded(blocks())
    odd = model()
    with on_all(size - 1, kind, text):
        fsdp.attach(odd if dist.get_rank() == size - 1 else good, 4)
    quantizer = fsdp.attach(good, 4)  # it is as before
    with pytest.raises(ValueError, match=r"is attached already; call attach only once"):
        fsdp.attach(good, 4)
    assert quantizer.bits == 4


@pytest.mark.promise("If `compress` fails on one rank, every rank raises an error.")
@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"replicas": 3}, ValueError, "model has no parameter on a mesh whose axis of replicas"),
        ({"discardable": True}, TypeError, "hvd_dyncomp.fsdp no longer takes discardable: leave it out"),
        ({"block_size": 3}, ValueError, "block_size"),
        ({"nonsense": 3}, TypeError, "hvd_dyncomp.fsdp takes no argument nonsense"),
        ({"controller": "x"}, TypeError, "controller must be a Controller, a Policy or a level"),
    ],
)
def test_bad_arguments(arguments, kind, text, rank):
    model = sharded(blocks())
    with on_all(0, kind, text):
        fsdp.attach(model, **(arguments if rank == 0 else {}))
    fsdp.attach(model, 4)
    if "replicas" not in arguments:
        with pytest.raises(kind, match=text):
            fsdp.register_backend(**arguments)


@pytest.mark.promise("If `compress` fails on one rank, every rank raises an error.")
def test_a_plan_that_one_rank_cannot_make(rank, size, monkeypatch):
    """The replicas of its shard hear of it; the others have no part in it."""

    def refused(*_):
        raise ValueError("these parameters cannot be sent")

    model, odd = sharded(blocks()), rank == size - 1
    if odd:
        monkeypatch.setattr(fsdp.quantizer.Quantizer, "_new_plan", refused)
    hears = rank not in of_first_shard(size) or size != 4
    expected = pytest.raises(ValueError if odd else LockstepError, match="these parameters cannot be sent")
    with expected if hears else contextlib.nullcontext():
        fsdp.attach(model, 4)


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


@pytest.mark.promise("FSDP2: a gradient that would not be a mean raises an error.")
@pytest.mark.parametrize("last", [True, False])
def test_an_all_reduce_that_no_unit_claims(last):
    """As where a program replaces the hooks: it would never become a mean."""
    _, model, _ = compressed(4)
    a_step(model, 0)
    (model if last else model.blocks[1]).set_all_reduce_hook(lambda flat: None)  # the model's own unit comes last
    with pytest.raises(RuntimeError, match="backward has called all_reduce with .* but no unit of an attached model"):
        a_step(model, 1)


@pytest.mark.promise("FSDP2: a gradient that would not be a mean raises an error.")
def test_a_mesh_of_the_same_ranks_without_the_backend():
    mesh()
    model = sharded(blocks(), mesh=mesh(backend=None))
    fsdp.attach(model, 4)
    with pytest.raises(RuntimeError, match="over another process group .* Give fully_shard the one with"):
        a_step(model, 0)


@pytest.mark.promise("FSDP2: a gradient that would not be a mean raises an error.")
def test_a_gradient_that_is_changed_in_backward(rank, size):
    """By something that runs where backward ends, before the means are there."""
    _, model, _ = compressed(4)
    a_step(model, 1)
    model.zero_grad()
    with pytest.raises(RuntimeError, match="the gradient of .* is not in the memory that FSDP gave"):
        loss = loss_of(model, 0, rank)
        taken = fsdp.Quantizer._at_end

        def first(self):
            model.last.weight.grad = None
            taken(self)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fsdp.Quantizer, "_at_end", first)
            loss.backward()


@pytest.mark.parametrize("accumulated", [False, True])
def test_an_exception_in_one_ranks_hook(accumulated, rank, size, monkeypatch):
    """Of a program's own, before the unit's step: the others hear of it, in the same step."""
    _, model, _ = compressed(4)
    a_step(model, 0)
    if accumulated:
        model.set_requires_all_reduce(False)
        a_step(model, 2)
        model.set_requires_all_reduce(True)
    if rank == size - 1:
        taken, calls = Unit.gradients, []

        def fails(self, flat, *, fits):
            calls.append(self)
            if len(calls) == 2:
                raise MemoryError("no more")
            return taken(self, flat, fits=fits)

        monkeypatch.setattr(Unit, "gradients", fails)
    if size == 4 and rank in of_first_shard(size):  # the others have an error
        a_step(model, 1)
        return
    expected = (MemoryError, "no more") if rank == size - 1 else (LockstepError, f"{LEFT}no more")
    with pytest.raises(expected[0], match=expected[1]):
        a_step(model, 1)


def test_an_exception_in_the_middle_of_backward():
    """On all ranks; FSDP itself does not go on after it, and neither do means that nobody has."""

    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx, values):
            return values.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise KeyError("in the middle")

    _, model, quantizer = compressed(4)
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
