"""The compressor on one worker: arguments, and what needs no other rank. The rest is in on_ranks/."""

import copy
import io
import logging
import pickle

import horovod.torch as hvd
import pytest
import torch

from hvd_dyncomp import Controller, DynamicQuantizer, Static
from hvd_dyncomp.transport import horovod, mpi_settings
from hvd_dyncomp.transport.horovod import HorovodTransport


@pytest.fixture(autouse=True, scope="module")
def initialized():
    hvd.init()


def test_a_policy_or_a_level_makes_a_controller():
    assert DynamicQuantizer(4).bits == DynamicQuantizer(Static(4)).bits == 4
    assert DynamicQuantizer(0.25).controller.policy.bits == 0.25


def test_defaults():
    q = DynamicQuantizer()
    assert isinstance(q.controller, Controller) and q.controller.bits == 4
    assert q.meter.records == {}


def test_one_worker_trains_as_without():
    """Horovod registers no hooks for a single worker; nothing must stand in its way."""
    model, quantizer = torch.nn.Linear(100, 50), DynamicQuantizer(1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=quantizer)
    before = model.weight.detach().clone()
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), before - 0.1 * 4)
    assert quantizer.meter.total().sent_bytes == 0
    quantizer.controller.step({})
    quantizer.check_replicas()


def test_state_before_the_first_step_round_trips():
    q, other = DynamicQuantizer(), DynamicQuantizer()
    other.load_state_dict(q.state_dict())
    assert other.state_dict() == q.state_dict()


class Optimizer(torch.optim.SGD):
    """As much of Horovod's optimizer as somebody looks at."""

    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1)
        self._requires_update = set(parameters)
        self._parameter_names = {p: f"p{i}" for i, p in enumerate(parameters)}
        self._allreduce_delay = dict.fromkeys(parameters, 1)
        self.process_set = None
        self.op = hvd.Average


def test_the_class_instead_of_a_quantizer_is_told_what_to_write(monkeypatch):
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # hooks, although there is one worker only
    model = torch.nn.Linear(100, 50)
    hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=DynamicQuantizer)
    with pytest.raises(TypeError, match=r"write compression=DynamicQuantizer\(4\)"):
        model(torch.ones(4, 100)).sum().backward()


def trained(monkeypatch, **arguments):
    """A quantizer bound to an optimizer. (One worker sends nothing, so it owes nothing either.)"""
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")
    quantizer, model = DynamicQuantizer(**arguments), torch.nn.Linear(100, 50)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=quantizer)
    model(torch.ones(4, 100)).sum().backward()
    optimizer.step()
    return quantizer, model, optimizer


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])  # noqa: S301
def test_a_copy_owes_what_the_original_owes_and_has_no_optimizer(monkeypatch, duplicate):
    quantizer, _, optimizer = trained(monkeypatch, block_size=128, min_numel=64)
    quantizer._plan.buckets[0].residuals.own[:5] = 3.0
    other = duplicate(quantizer)
    state, copied = quantizer.state_dict(), other.state_dict()
    assert copied["steps"] == state["steps"] == 1 and copied["meter"] == state["meter"]
    for name, residual in state["residuals"].items():
        assert torch.equal(copied["residuals"][name], residual)
    assert other._plan is None
    assert other._arguments == quantizer._arguments
    assert other.controller.bits == quantizer.controller.bits and other.controller is not quantizer.controller


def test_what_cannot_be_copied_says_why(monkeypatch):
    quantizer, model, optimizer = trained(monkeypatch)
    model(torch.ones(4, 100)).sum().backward()
    for forbidden in (lambda: pickle.dump(quantizer, io.BytesIO()), quantizer.drop_residuals):
        with pytest.raises(RuntimeError, match="between steps"):
            forbidden()
    optimizer.step()
    quantizer.drop_residuals()
    with pytest.raises(TypeError, match="named_parameters cannot be pickled"):
        pickle.dumps(DynamicQuantizer(named_parameters=model.named_parameters()))


def test_attached_with_one_worker_whose_gradients_nobody_reduces():
    quantizer, parameter = DynamicQuantizer(), torch.nn.Parameter(torch.ones(3000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=quantizer)
    quantizer.attach(optimizer)
    parameter.sum().backward()
    optimizer.step()
    assert not parameter.any()
    quantizer.load_state_dict(copy.deepcopy(quantizer.state_dict()))


def test_attached_to_what_is_not_its_optimizer(monkeypatch):
    quantizer, _, optimizer = trained(monkeypatch)
    quantizer.attach(optimizer)
    with pytest.raises(ValueError, match="optimizer must be what hvd.DistributedOptimizer"):
        DynamicQuantizer().attach(optimizer)


YIELD, TCP = {"OMPI_MCA_mpi_yield_when_idle"}, {name for name in mpi_settings.DEFAULTS if "tcp" in name}


@pytest.mark.parametrize(
    ("cores", "ranks", "hosts", "told", "named"),
    [
        (2, 2, 1, set(), YIELD),
        (3, 2, 1, set(), YIELD),
        (4, 2, 1, set(), set()),
        (2, 2, 1, YIELD, set()),
        (4, 2, 2, YIELD, TCP),
        (2, 2, 2, set(), YIELD | TCP),
        (2, 2, 2, YIELD | TCP, set()),
    ],
)
def test_one_line_names_all_that_open_mpi_should_have_been_told(monkeypatch, caplog, cores, ranks, hosts, told, named):
    monkeypatch.setattr(horovod, "_advised", set())
    monkeypatch.setattr(horovod.os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(hvd, "local_size", lambda: ranks)
    monkeypatch.setattr(hvd, "size", lambda: hosts * ranks)
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: True)
    for name in mpi_settings.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    for name in told:
        monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        for _ in range(2):
            HorovodTransport().advise([torch.device("cpu")])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == bool(named)
    assert {name for line in lines for name in mpi_settings.DEFAULTS if f" {name}=" in line} == named


@pytest.mark.parametrize(("name", "says"), [("WORLD_SIZE", 1), ("SLURM_STEP_NUM_TASKS", 1), ("HOROVOD_SIZE", 0)])
def test_ranks_of_another_launcher_that_train_alone_are_told_so_once(monkeypatch, caplog, name, says):
    """By torchrun, for example: Horovod itself says nothing. Of an elastic job one rank may be left."""
    monkeypatch.setattr(horovod, "_advised", set())
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: False)
    monkeypatch.setenv(name, "2")
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        for _ in range(2):
            HorovodTransport().advise([torch.device("cpu")])
    assert [f"1 rank is connected, but {name}=2" in line for line in caplog.messages] == [True] * says


@pytest.mark.parametrize(("current", "rank", "says"), [("default", 0, 1), ("its own", 0, 0), ("default", 1, 0)])
def test_who_trains_in_a_gpus_default_stream_is_advised_once(monkeypatch, caplog, current, rank, says):
    """Horovod waits for that stream before it sends."""
    monkeypatch.setattr(horovod, "_advised", set())
    monkeypatch.setattr(hvd, "mpi_enabled", lambda: False)
    monkeypatch.setattr(hvd, "rank", lambda: rank)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: "default")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        for _ in range(2):
            HorovodTransport().advise([torch.device("cpu"), torch.device("cuda:0")])
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == says and all("torch.cuda.set_stream" in line for line in lines)
