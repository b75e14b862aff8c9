"""What the callback for Transformers' Trainer does, in one process and without Transformers.

clusters/test_ddp_recipes.py has the real Trainer on several ranks.
"""

import importlib
import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from hvd_dyncomp import AllRanks, Schedule, StepFunction


class Trainer:
    def __init__(self, model):
        self.model = self.model_wrapped = model
        self.is_fsdp_enabled, self.compute_metrics = False, print

    def _get_output_dir(self, trial):
        return f"{self.args.output_dir}/run-{trial}" if trial else self.args.output_dir


@pytest.fixture
def integration(monkeypatch):
    """The module, as it is imported where there is a Transformers of ours."""
    transformers, utilities = ModuleType("transformers"), ModuleType("transformers.trainer_utils")
    transformers.Trainer, transformers.TrainerCallback, utilities.PREFIX_CHECKPOINT_DIR = Trainer, object, "checkpoint"
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setitem(sys.modules, "transformers.trainer_utils", utilities)
    monkeypatch.delitem(sys.modules, "hvd_dyncomp.integrations.transformers", raising=False)
    yield importlib.import_module("hvd_dyncomp.integrations.transformers")
    del sys.modules["hvd_dyncomp.integrations.transformers"]


class Run:
    """Calls a callback as a `Trainer` does."""

    def __init__(self, integration, folder, controller=4, **args):
        self.trainer = Trainer(torch.nn.Linear(40, 30))
        self.callback = integration.CompressionCallback(self.trainer, controller, block_size=64)
        self.trainer.model.load_state_dict({"weight": torch.ones(30, 40), "bias": torch.ones(30)})
        args = {"should_save": True, "save_only_model": False, "resume_from_checkpoint": None, **args}
        args = {"eval_strategy": "epoch", **args}
        self.args = self.trainer.args = SimpleNamespace(output_dir=str(folder), **args)

    def begin(self, step=0, log=()):
        self.state = SimpleNamespace(global_step=step, log_history=list(log))
        self.callback.on_train_begin(self.args, self.state, None, model=None)
        return self.callback.quantizer

    def evaluate(self, step, **metrics):
        self.state.global_step = step
        self.callback.on_evaluate(self.args, self.state, None, metrics, model=None)
        return self.callback.quantizer.controller.history

    def save(self, step):
        self.state.global_step = step
        folder = Path(self.trainer._get_output_dir(getattr(self.trainer, "_trial", None))) / f"checkpoint-{step}"
        folder.mkdir(parents=True, exist_ok=True)
        self.callback.on_save(self.args, self.state, None, model=None)
        return folder / "quantizer.pt"


@pytest.fixture
def run(integration, tmp_path):
    return Run(integration, tmp_path, Schedule({0: 4, 1: 8, 2: 16}))


NOISE = {"eval_runtime": 1.5, "eval_samples_per_second": 3.0, "eval_model_preparation_time": 1.0, "epoch": 1.0}


def test_an_evaluation_steps_the_controller_with_what_says_something(run):
    run.begin(log=[{"loss": 0.9}, {"loss": 0.5, "epoch": 1.0}, {"eval_loss": 0.7}])
    [record] = run.evaluate(10, eval_accuracy=0.5, eval_loss=0.7, eval_name="x", **NOISE)
    assert record.metrics == {"eval_accuracy": 0.5, "eval_loss": 0.7, "train_loss": 0.5} and record.bits == 8


def test_an_evaluation_counts_if_the_model_has_trained_since(run):
    run.callback.on_evaluate(run.args, SimpleNamespace(global_step=0, log_history=[]), None, {"eval_loss": 1.0})
    run.begin()
    assert run.evaluate(0, eval_loss=1.0) == []
    assert len(run.evaluate(10, eval_a_loss=1.0)) == 1 == len(run.evaluate(10, eval_b_loss=1.0))
    assert len(run.evaluate(20, eval_a_loss=1.0)) == 2


@pytest.mark.parametrize("trial", [None, 1])
def test_a_checkpoint_brings_back_what_it_was_given(trial, run, integration, tmp_path):
    """Also that of a trial of a search."""
    run.trainer._trial = trial
    first = run.begin()
    run.evaluate(10, eval_loss=1.0)
    path = run.save(10)
    assert [each.name for each in path.parent.iterdir()] == ["quantizer.pt"]
    again = Run(integration, tmp_path, Schedule({0: 4, 1: 8, 2: 16}))
    again.trainer._trial = trial
    resumed = again.begin(10)
    assert resumed is not first and resumed.controller.history == first.controller.history
    assert len(again.evaluate(10, eval_loss=1.0)) == 1  # of before
    moved = tmp_path / "moved"
    path.parent.rename(moved)
    elsewhere = Run(integration, tmp_path, 8, resume_from_checkpoint=str(moved))
    assert elsewhere.begin(10).controller.epoch == 1
    assert elsewhere.begin(0) is elsewhere.callback.quantizer


@pytest.mark.parametrize("content", [None, b"", b"no state"])
def test_without_its_file_a_checkpoint_is_resumed_with_a_warning(content, run, tmp_path, caplog):
    if content is not None:
        run.begin()
        run.save(10).write_bytes(content)
    with caplog.at_level(logging.WARNING, "hvd_dyncomp"):
        assert run.begin(10).controller.epoch == 0
    assert "checkpoint-10/quantizer.pt cannot be used on all ranks (" in caplog.text


def test_a_second_training_goes_on_unless_the_model_is_another(run):
    first = run.begin()
    assert run.begin() is first
    run.trainer.model = run.trainer.model_wrapped = torch.nn.Linear(40, 30)
    assert run.begin() is not first


def test_only_who_should_save_writes_and_nothing_is_written_without_optimizers(integration, tmp_path):
    for number, kept in enumerate(({"should_save": False}, {"save_only_model": True})):
        one = Run(integration, tmp_path / str(number), **kept)
        one.begin()
        assert not one.save(10).exists()


def test_what_is_saved_is_the_state_of_all_ranks(run):
    quantizer = run.begin()
    saved = torch.load(run.save(10), weights_only=True)
    assert sorted(saved) == sorted([*AllRanks(quantizer).state_dict(), "parameters"])


def test_the_file_of_another_run_is_not_taken(run, integration, tmp_path, caplog):
    """The model came from elsewhere, and output_dir has a checkpoint of that number, of an older run."""
    run.begin()
    run.evaluate(10, eval_loss=1.0)
    run.save(10)
    other = Run(integration, tmp_path, Schedule({0: 4, 1: 8, 2: 16}))
    torch.nn.init.zeros_(other.trainer.model.bias)
    with caplog.at_level(logging.WARNING, "hvd_dyncomp"):
        assert other.begin(10).controller.epoch == 0
    assert "it belongs to other parameters than the model has now" in caplog.text


def test_what_is_evaluated_after_training_is_nothing_for_the_controller(run):
    run.begin()
    assert len(run.evaluate(10, eval_loss=1.0)) == 1
    run.callback.on_train_end(run.args, run.state, None)
    assert len(run.evaluate(13, test_loss=1.0)) == 1


@pytest.mark.parametrize(
    ("controller", "computes", "strategy", "said"),
    [
        (4, False, "no", []),
        (Schedule({0: 4}), True, "no", ["never moves"]),
        (StepFunction(), False, "epoch", ["compute_metrics"]),
        (StepFunction(), True, "steps", []),
        (None, False, "no", []),  # 4 bits
    ],
)
def test_what_cannot_work_is_said_when_training_begins(
    controller, computes, strategy, said, integration, tmp_path, caplog
):
    one = Run(integration, tmp_path, controller, eval_strategy=strategy)
    one.trainer.compute_metrics = print if computes else None
    with caplog.at_level(logging.WARNING, "hvd_dyncomp.integrations"):
        one.begin()
    messages = [record.getMessage() for record in caplog.records if "integrations" in record.name]
    assert len(messages) == len(said) and all(part in message for part, message in zip(said, messages, strict=True))


def test_a_model_that_trainer_has_not_wrapped_is_refused(run, integration, monkeypatch):
    monkeypatch.setattr(integration, "processes", lambda: 2)
    with pytest.raises(TypeError, match=r"call evaluate\(\) and predict\(\) after train\(\)"):
        run.begin()


def test_only_a_trainer_is_one(integration):
    with pytest.raises(TypeError, match="trainer must be a transformers.Trainer, got NoneType"):
        integration.CompressionCallback(None, 4)


def test_without_transformers_one_sentence_says_what_is_missing():
    code = "import sys; sys.modules['transformers'] = None; import hvd_dyncomp.integrations.transformers"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=120)
    said = "ImportError: hvd_dyncomp.integrations.transformers needs Transformers: pip install transformers"
    assert done.stderr.strip().splitlines()[-1] == said
