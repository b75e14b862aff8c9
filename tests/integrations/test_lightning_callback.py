"""The callback for Lightning, called as Lightning calls it, by one process. clusters/ has Lightning itself."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hvd_dyncomp import Controller, Schedule

NAME = "hvd_dyncomp.integrations.lightning"


class Callback:
    """Lightning's, as far as it matters."""


@pytest.fixture
def make(monkeypatch):
    """The class of the callback, with a Lightning that has nothing but the class to derive from."""
    package, other = ModuleType("lightning"), ModuleType("lightning.pytorch")
    other.Callback = Callback
    monkeypatch.setitem(sys.modules, "lightning", package)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", other)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME).CompressionCallback
    sys.modules.pop(NAME)


class Trainer:
    """Calls a callback as Lightning's Trainer does."""

    sanity_checking = False

    def __init__(self, callback, module):
        self.callback, self.module = callback, module
        self.strategy, self.callback_metrics = SimpleNamespace(model=module), {}

    def begin(self, stage="fit", checkpoint=None):
        self.callback.setup(self, self.module, stage)
        if checkpoint:  # Lightning leaves out what is empty
            self.callback.load_state_dict(checkpoint)
        if stage == "fit":
            self.callback.on_fit_start(self, self.module)

    def validate(self, **metrics):
        self.callback.on_validation_start(self, self.module)
        self.callback_metrics |= {name: torch.tensor(value) for name, value in metrics.items()}
        self.callback.on_validation_end(self, self.module)

    def step(self):
        self.callback.quantizer.mean_([torch.zeros(3, 4), torch.zeros(3)])

    @property
    def known(self):
        """Steps, and the epochs of the controller."""
        return self.callback.quantizer.state_dict()["steps"], len(self.callback.quantizer.controller.history)


@pytest.fixture
def trainer(make):
    trainer = Trainer(make(Schedule({0: 4, 1: 8})), torch.nn.Linear(4, 3))
    assert isinstance(trainer.callback, Callback)
    return trainer


def test_each_validation_moves_the_level(trainer):
    trainer.begin()
    assert trainer.callback.quantizer.bits == 4
    trainer.sanity_checking = True
    trainer.validate(val_loss=3.0)
    trainer.sanity_checking = False
    trainer.validate(val_loss=2.0)
    assert trainer.callback.quantizer.controller.bits == 8
    trainer.callback_metrics["train_loss"] = torch.tensor(1.0)
    trainer.validate(val_loss=2.0)
    records = trainer.callback.quantizer.controller.history
    assert [record.metrics for record in records] == [{"val_loss": 2.0}] * 2


def test_named_metrics(make):
    trainer = Trainer(make(4, metrics=["train_loss", "absent"]), torch.nn.Linear(4, 3))
    trainer.begin()
    trainer.callback_metrics["train_loss"] = torch.tensor(1.0)
    trainer.validate(val_loss=2.0)
    assert trainer.callback.quantizer.controller.history[0].metrics == {"train_loss": 1.0}


def test_a_validation_outside_fit_moves_nothing(trainer):
    trainer.begin("validate")
    trainer.validate(val_loss=2.0)
    assert trainer.callback.quantizer is None and trainer.callback.state_dict() == {}
    trainer.begin()
    trainer.begin("validate")
    trainer.validate(val_loss=2.0)
    assert trainer.known == (0, 0)


def test_a_checkpoint_is_loaded_when_fit_begins(trainer, make):
    trainer.begin()
    trainer.step()
    trainer.validate(val_loss=2.0)
    state = trainer.callback.state_dict()
    other = Trainer(make(Schedule({0: 4, 1: 8})), torch.nn.Linear(4, 3))
    other.begin(checkpoint=state)
    assert other.known == (1, 1) and other.callback.quantizer.bits == 8
    other.step()
    other.callback.load_state_dict(state)  # of a tuner within fit
    assert other.known == (1, 1)


def test_a_checkpoint_that_an_exception_makes_waits_for_no_other_rank(trainer, caplog):
    trainer.begin()
    assert trainer.callback.state_dict()
    trainer.callback.on_exception(trainer, trainer.module, ValueError("on this rank"))
    assert trainer.callback.state_dict() == {} and "after an exception, does not contain the state" in caplog.text
    trainer.begin()
    assert trainer.callback.state_dict()


def test_within_a_step_there_is_no_state_and_that_ends_no_run(trainer, caplog):
    """A signal that a cluster sends in backward, or an exception in it."""
    trainer.begin()
    state = trainer.callback.state_dict()
    trainer.callback.quantizer._step = "in flight"
    assert trainer.callback.state_dict() == {}
    trainer.begin(checkpoint=state)
    assert trainer.callback.state_dict() and caplog.text.count("gradients are in flight") == 1
    trainer.callback.quantizer._step = "in flight"
    trainer.begin()
    assert trainer.callback.state_dict() and "starts with zero residuals" in caplog.text


def test_a_second_fit_of_the_module_continues(trainer):
    trainer.begin()
    state = trainer.callback.state_dict()
    trainer.step()
    trainer.validate(val_loss=2.0)
    trainer.begin("validate", checkpoint=state)
    trainer.begin()
    assert trainer.known == (1, 1)
    trainer.begin(checkpoint=state)
    assert trainer.known == (0, 0)


def test_a_second_fit_of_another_module_begins_anew(trainer):
    trainer.begin()
    trainer.step()
    trainer.validate(val_loss=2.0)
    trainer.module = trainer.strategy.model = torch.nn.Linear(4, 3)
    trainer.begin()
    assert trainer.known == (0, 0)


@pytest.mark.parametrize("metrics", ["val_loss", [1], 5, {"val_loss"}])
def test_metrics_that_are_no_names_are_refused(make, metrics):
    with pytest.raises(TypeError, match="^metrics must be a list or tuple of names, got "):
        make(4, metrics=metrics)


def test_arguments_are_those_of_compress(make):
    trainer = Trainer(make(Controller(4), min_numel="x"), torch.nn.Linear(4, 3))
    with pytest.raises(ValueError, match="min_numel"):
        trainer.begin()
