"""The same script runs with one process: frameworks then wrap no model, and nothing connects the ranks."""

import logging

import pytest
import torch
from torch import nn

from hvd_dyncomp import AllRanks, Averager, Controller, StepFunction, ddp, transport
from hvd_dyncomp.simulate import World
from hvd_dyncomp.transport import launched

METRICS = {"val_accuracy": 0.9, "train_loss": 1.0}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in launched._SIZES:
        monkeypatch.delenv(name, raising=False)
    for module in (transport, launched):  # another test of this process may have initialized one
        monkeypatch.setattr(module, "initialized_horovod", lambda: None)
        monkeypatch.setattr(module, "has_process_group", lambda: False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 2))


def test_a_model_that_trains_alone_is_left_as_it_is(caplog):
    net, twin = model(), model()
    twin.load_state_dict(net.state_dict())
    with caplog.at_level(logging.WARNING):
        quantizer = ddp.compress(net, StepFunction())
    assert caplog.messages == ["compress: one process trains this model, so there is nothing to compress"]
    for each in (net, twin):
        each(torch.ones(3, 40)).sum().backward()
    assert all(
        torch.equal(one.grad, other.grad) for one, other in zip(net.parameters(), twin.parameters(), strict=True)
    )
    assert quantizer.bits == 4 and quantizer.controller.step(METRICS) == 16 == quantizer.bits
    assert quantizer.meter.total().sent_bytes == 0
    quantizer.check_replicas()


@pytest.mark.parametrize(
    "name", ["WORLD_SIZE", "HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_what_a_launcher_started_is_not_one_process(name, monkeypatch):
    """Made before `hvd.init` or `init_process_group`, or each rank would train alone."""
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"nothing connects the ranks.* unset {name} if each process trains alone"):
        Averager([("a", torch.zeros(3000))], 4)


def test_steps_leave_nothing_behind():
    averager = Averager([("a", torch.zeros(3000))], 4)
    for _ in range(3):
        averager.mean_([torch.ones(3000)])
    assert averager.meter.total().sent_bytes == 0


def test_a_state_of_two_ranks_is_taken_without_residuals_and_given_on():
    def program(ours):
        each = Averager(named, Controller(StepFunction(), transport=ours), transport=ours)
        each.mean_([torch.randn(parameter.shape) for _, parameter in named])
        each.controller.step(METRICS)
        return AllRanks(each).state_dict()

    named = list(model().named_parameters())
    quantizer = ddp.compress(model(), Controller(StepFunction()))
    AllRanks(quantizer).load_state_dict(World(2).run(program)[0])
    assert quantizer.bits == 16 and quantizer.controller.epoch == 1
    assert not any(residual.any() for residual in quantizer.state_dict()["residuals"].values())
    assert len(AllRanks(quantizer).state_dict()["ranks"]) == 1


@pytest.mark.parametrize("name", launched._SIZES)
def test_with_other_processes_it_is_a_mistake(name, monkeypatch):
    monkeypatch.setenv(name, "2")
    with pytest.raises(
        TypeError, match=r"DistributedDataParallel, got Sequential.*; pass what the framework has wrapped"
    ):
        ddp.compress(model(), 4)
    with pytest.raises(ValueError, match="nothing connects the ranks"):
        Controller(4).step(METRICS)


@pytest.mark.parametrize(
    ("connected", "started", "named"),
    [
        (1, {}, ""),
        (2, {"WORLD_SIZE": "2"}, ""),
        (1, {"WORLD_SIZE": "2"}, "1 rank is connected, but WORLD_SIZE=2 says that 2 were started"),
        (1, {"WORLD_SIZE": "1", "SLURM_STEP_NUM_TASKS": "4"}, "1 rank is connected, but SLURM_STEP_NUM_TASKS=4"),
        (2, {"WORLD_SIZE": "4"}, "2 ranks are connected, but WORLD_SIZE=4 says that 4 were started"),
        (2, {"OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "8"}, ""),  # mpirun's daemons are Slurm's tasks
        (3, {"OMPI_COMM_WORLD_SIZE": "3", "SLURM_STEP_NUM_TASKS": "2"}, ""),
    ],
)
def test_ranks_that_are_not_connected_are_missed(connected, started, named, monkeypatch):
    for name, size in started.items():
        monkeypatch.setenv(name, size)
    said = launched.missing(connected)
    assert named in said and bool(said) == bool(named)


def test_a_controller_may_get_company_later(monkeypatch):
    controller = Controller(4)
    assert controller.transport.size == 1
    monkeypatch.setattr(transport, "initialized_horovod", lambda: object())
    there = World(2).transports[1]
    monkeypatch.setattr(transport, "given_or_horovod", lambda _: there)
    assert controller.transport is there is controller.transport


@pytest.mark.parametrize("wrong", [None, 4, "model", object(), [model()]])
def test_what_is_no_model_is_refused(wrong):
    with pytest.raises(TypeError, match="model must be a torch.nn.parallel.DistributedDataParallel, got"):
        ddp.compress(wrong, 4)
