"""What many steps make of a run, and what is refused."""

import copy
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from problem import Linear, assert_means, distributed, gradients, same_on_all_ranks
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvd_dyncomp
from hvd_dyncomp import AllRanks, Controller, LockstepError, Schedule, Static, StepFunction, ddp
from hvd_dyncomp.diagnostics import relative_errors
from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport


class Task:
    """A regression that every rank sees another part of."""

    def __init__(self, compressed=True, controller=2, **arguments) -> None:
        torch.manual_seed(3)
        module = nn.Sequential(nn.Linear(32, 96), nn.ReLU(), nn.Linear(96, 4))
        self.teacher = nn.Linear(32, 4)
        self.model = DistributedDataParallel(module, bucket_cap_mb=0.004)
        self.quantizer = None
        if compressed:
            self.quantizer = ddp.compress(self.model, controller, block_size=64, **arguments)
        self.optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)

    def train(self, steps: range) -> float:
        for step in steps:
            generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
            batch = torch.randn(32, 32, generator=generator)
            loss = (self.model(batch) - self.teacher(batch).detach()).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        return float(loss)

    def state(self) -> dict:
        parts = {"model": self.model, "optimizer": self.optimizer, "quantizer": self.quantizer}
        parts["controller"] = self.quantizer.controller
        return copy.deepcopy({name: part.state_dict() for name, part in parts.items()})

    def load(self, state: dict) -> None:
        self.quantizer.controller.load_state_dict(state["controller"])
        for part in ("model", "optimizer", "quantizer"):
            getattr(self, part).load_state_dict(state[part])

    @property
    def weights(self) -> list[torch.Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]


def test_it_learns_as_without_compression():
    plain, ours = Task(compressed=False), Task()
    first = plain.train(range(1))
    ours.train(range(1))
    theirs, mine = plain.train(range(1, 60)), ours.train(range(1, 60))
    assert same_on_all_ranks(ours.weights)
    assert theirs < 0.5 * first and mine < 0.6 * first


def test_a_run_that_is_resumed_is_the_same():
    """At a level with residuals of both kinds, after an epoch in which the level has moved."""
    whole = Task(controller=StepFunction())
    whole.train(range(5))
    whole.quantizer.controller.step({"val_accuracy": 0.85, "train_loss": 1.0})
    state = whole.state()
    whole.train(range(5, 9))
    again = Task(controller=StepFunction())
    again.train(range(2))  # what was before it is loaded leaves no trace
    again.load(state)
    assert again.quantizer.bits == state["controller"]["bits"]
    again.train(range(5, 9))
    for one, other in zip(whole.weights, again.weights, strict=True):
        assert torch.equal(one, other)
    assert again.quantizer.meter.total().steps == whole.quantizer.meter.total().steps == 9


def test_a_controller_moves_the_level_on_all_ranks(rank):
    controller = Controller(hvd_dyncomp.Schedule({0: 32, 1: 8}), transport=ddp.transport())
    tasks = [Task(controller=controller), Task(controller=controller, warmup_steps=8, warmup_bits=16)]
    for epoch, levels in enumerate([(32, 32), (8, 16), (8, 16), (8, 8)]):
        assert tuple(task.quantizer.bits for task in tasks) == levels
        for task in tasks:
            task.train(range(3 * epoch, 3 * epoch + 3))
            assert same_on_all_ranks(task.weights)
        controller.step({"accuracy": rank / 10})
    module = tasks[0].model.module
    assert relative_errors(tasks[0].quantizer, {name: p.grad for name, p in module.named_parameters()})


@pytest.mark.parametrize("bits", [4, 2, 1, 0.25])
def test_unused_rows_of_an_embedding(bits, rank):
    """Every other row, and the padding's: 1 bit has no code for zero. -s prints docs/math.md's figures."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Embedding(400, 32, padding_idx=0), nn.Flatten(), nn.Linear(8 * 32, 10))
    before = module[0].weight.detach().clone()
    model = DistributedDataParallel(module)
    quantizer = ddp.compress(model, bits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(100):
        rows = 2 * torch.randint(0, 200, (64, 8), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), rows.sum(1) // 2 % 10).backward()
        optimizer.step()
    quantizer.check_replicas()
    moved = module[0].weight.detach() - before
    used, unused, padding = (float(part.square().mean().sqrt()) for part in (moved[2::2], moved[1::2], moved[:1]))
    if bits == 1:
        assert 0 < unused < 0.3 * used and 0 < padding < 0.3 * used
    else:
        assert unused == padding == 0 < used
    if rank == 0:
        print(f"{bits} bits: unused rows {unused / used:.3f}, padding {padding / used:.3f} of used rows")


def test_between_steps_only():
    """A hook of the user's would save a state while gradients are exchanged."""
    model, quantizer = distributed(4)
    said = []

    def save(gradient):
        try:
            quantizer.state_dict()
        except RuntimeError as error:
            said.append(str(error))

    for value in model.module.values:
        value.register_hook(save)
    for seed in range(2):  # buckets are as small as they are to be after the first
        model(seed).backward()
    assert said and set(said) == {"state_dict must be called between steps, but gradients are in flight"}
    quantizer.state_dict()


class _FabricModule(nn.Module):
    """As Lightning Fabric's, which is known by its name."""

    def __init__(self, model) -> None:
        super().__init__()
        self._forward_module = model


@pytest.mark.parametrize("wrap", [torch.compile, _FabricModule, lambda model: _FabricModule(torch.compile(model))])
def test_wrappers_are_looked_through(wrap):
    model = DistributedDataParallel(Linear())
    quantizer = ddp.compress(wrap(model), 4)
    model(0).backward()
    assert quantizer.meter.total().saved_fraction > 0


def test_the_states_of_all_ranks_are_one(rank):
    """And a controller needs no transport: it is that of the process group."""
    model = DistributedDataParallel(Linear())
    quantizer = ddp.compress(model, Controller(Schedule({0: 1, 1: 4})))
    for seed in range(3):
        model(seed).backward()
    assert quantizer.controller.step({"loss": float(rank)}) == 4
    mine, state = quantizer.state_dict(), AllRanks(quantizer).state_dict()
    assert len(state["ranks"]) == dist.get_world_size()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [each.numpy().tobytes() for each in state["ranks"]])
    assert all(theirs == everyone[0] for theirs in everyone)
    model(3).backward()
    AllRanks(quantizer).load_state_dict(state)
    again = quantizer.state_dict()
    assert all(torch.equal(again["residuals"][name], residual) for name, residual in mine["residuals"].items())
    assert any(residual.any() for residual in mine["residuals"].values())
    other = ddp.compress(DistributedDataParallel(Linear()), Controller(Schedule({0: 1, 1: 4})))
    AllRanks(other).load_state_dict(state)
    assert other.bits == 4 and other.controller.history == quantizer.controller.history


def test_refused_in_a_sentence():
    model, mesh = DistributedDataParallel(Linear()), init_device_mesh("cpu", (dist.get_world_size(),))
    for wrong, text in (
        (model.module, r"got Linear.*; pass what the framework has wrapped: .*trainer.model_wrapped"),
        (4, "got 4$"),
        (replicate(nn.Linear(4, 4)), "made by torch's replicate.*: wrap the model in DistributedDataParallel"),
        (
            replicate_with_fsdp(nn.Linear(4, 4), mesh=mesh),
            "made by torch's replicate.* a mesh with the backend of hvd_dyncomp.fsdp.register_backend",
        ),
        (fully_shard(nn.Linear(4, 4), mesh=mesh), "hvd_dyncomp.fsdp.register_backend"),
    ):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.parallel.DistributedDataParallel, .*" + text):
            ddp.compress(wrong, 4)
    with pytest.raises(TypeError, match="compress takes no argument levels"):
        ddp.compress(model, 4, levels=3)
    for arguments, text in (
        ({"block_size": 3}, "block_size must be"),
        ({"rounding": "stochastic"}, "compress no longer takes rounding: leave it out: values are rounded to nearest"),
        ({"skip": "embedding"}, "skip must be a function"),
        ({"warmup_steps": -1}, "warmup_steps must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=text):
            ddp.compress(model, 4, **arguments)
    with pytest.raises(TypeError, match="controller must be"):
        ddp.compress(model, "4")
    quantizer = ddp.compress(model, 4)
    with pytest.raises(ValueError, match="has a communication hook already"):
        ddp.compress(model, 4)
    with pytest.raises(RuntimeError, match="can only be called once"):
        model.register_comm_hook(None, lambda state, bucket: None)
    builtin = DistributedDataParallel(Linear())
    builtin._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(ValueError, match="has a communication hook already"):
        ddp.compress(builtin, 4)
    with pytest.raises(ValueError, match="state must come from state_dict"):
        quantizer.load_state_dict({"steps": 1})
    model(0).backward()  # what was refused has changed nothing
    assert same_on_all_ranks(gradients(model))


def test_without_a_level_it_has_4_bits():
    quantizer = ddp.compress(DistributedDataParallel(Linear()))
    assert quantizer.controller.policy.config() == Static(4).config()
    assert quantizer.controller.step({}) == 4


@pytest.mark.parametrize("synced", [False, True])
def test_a_model_that_never_exchanges_is_warned_of_once(synced, rank, monkeypatch, caplog):
    """Within Accelerate's LocalSGD all passes run in no_sync, and nothing would be compressed in silence."""
    monkeypatch.setattr("hvd_dyncomp.ddp.model._PASSES", 5)
    model, _ = distributed(4)
    if synced:
        model(0).backward()
    with model.no_sync():
        for seed in range(12):
            model(seed).backward()
            assert len(caplog.messages) == (not synced and rank == 0 and seed >= 4)
    said = "the first 5 backward passes of a compressed model have exchanged nothing, so compress has no effect"
    assert all(message.startswith(said) for message in caplog.messages)
    model.zero_grad()
    model(0).backward()
    assert same_on_all_ranks(gradients(model))


def test_mixed_precision_of_the_model_has_a_hook_of_its_own(monkeypatch):
    from torch.nn.parallel.distributed import _MixedPrecision

    both = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "Stream", object)  # builds for CUDA make none without a GPU; only forward would use it
        model = DistributedDataParallel(Linear(), mixed_precision=both)
    with pytest.raises(ValueError, match="mixed_precision= of DistributedDataParallel has a communication hook"):
        ddp.compress(model, 4)


def test_parameters_whose_reduction_is_delayed_meet_no_hook():
    module = Linear()
    first, second, *_ = module.named_parameters()
    model = DistributedDataParallel(
        module, delay_all_reduce_named_params=[first], param_to_hook_all_reduce=second[1], bucket_cap_mb=0.01
    )
    with pytest.raises(ValueError, match="delay_all_reduce_named_params= of DistributedDataParallel reduces"):
        ddp.compress(model, 4)


@pytest.mark.promise("A late rank does no harm; who waits for it in `Controller.step` for 10 s logs a warning.")
def test_a_rank_that_is_stopped_for_a_while_is_waited_for(rank):
    """Nothing is lost."""
    model, _ = distributed(16)
    last = gather_json(ddp.transport(), os.getpid(), "processes")[-1]
    dist.barrier()
    if rank == 0:
        os.kill(last, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, [last, signal.SIGCONT]).start()
    for seed in range(3):
        model.zero_grad()
        model(seed).backward()
        assert_means(gradients(model), model.module.mean(seed), 16)
    dist.barrier()


@pytest.mark.parametrize("odd", ["level", "settings", "step"])
def test_ranks_that_disagree_all_hear_of_it(odd, rank, size):
    """And raise it where backward ends. In a group of its own: a step that has failed is the last."""
    group = dist.new_group()
    different = rank == size - 1
    bits = 8 if odd == "level" and different else 4
    arguments = {"block_size": 128} if odd == "settings" and different else {"block_size": 64}
    model = DistributedDataParallel(Linear(), process_group=group)
    quantizer = ddp.compress(model, bits, **arguments)
    if odd == "step" and different:
        quantizer.load_state_dict({**quantizer.state_dict(), "steps": 5})
    with pytest.raises(LockstepError) as caught:
        model(0).backward()
    text = {"level": "bits", "settings": "block_size", "step": "step"}[odd]
    assert text in str(caught.value) and f"rank {size - 1}" in str(caught.value)
    assert "hvd" not in str(caught.value)  # no advice for Horovod's users
    dist.barrier()


def test_one_transport_a_group():
    assert ddp.transport() is ddp.transport(dist.group.WORLD)
    assert isinstance(ddp.transport(), ProcessGroupTransport)
    assert ddp.transport(dist.new_group()) is not ddp.transport()
