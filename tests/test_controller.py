"""The controller on one worker. What concerns several is in test_controller_on_ranks.py."""

import copy
import json
import logging
import math
import pickle
import subprocess
import sys

import horovod.torch as hvd
import pytest

from hvd_dyncomp import Controller, ControllerError, Decision, Policy, Schedule, Static, StepFunction


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def ladder(**arguments):
    return Controller(StepFunction(levels=(2, 4), thresholds=(0.5,)), **arguments)


def metrics(accuracy, loss=1.0):
    return {"val_accuracy": accuracy, "train_loss": loss}


def test_step_moves_the_level_and_keeps_the_history():
    controller = ladder()
    assert (controller.bits, controller.epoch) == (2, 0)
    assert controller.step(metrics(0.1)) == 2
    assert controller.step(metrics(0.6)) == 4
    assert (controller.bits, controller.epoch) == (4, 2)
    assert [(r.epoch, r.bits) for r in controller.history] == [(0, 2), (1, 4)]
    assert controller.history[1].metrics == metrics(0.6) and "reached" in controller.history[1].reason


def test_the_default_is_the_papers_rule():
    assert Controller().bits == 4
    assert Controller().policy.config() == StepFunction().config()


def test_an_epoch_seen_before_changes_nothing(caplog):
    controller = ladder()
    controller.step(metrics(0.1), epoch=4)
    with caplog.at_level(logging.WARNING):
        assert controller.step(metrics(0.9), epoch=4) == 2
    assert "epoch 4" in caplog.text and len(controller.history) == 1
    assert controller.step(metrics(0.9)) == 4 and controller.history[-1].epoch == 5


def test_another_policy_takes_over_when_a_state_is_loaded(caplog):
    before = Controller(4)
    before.step({"train_loss": 1.0})
    saved = before.state_dict()
    for policy, bits in ((32, 32), (Schedule({0: 2, 1: 8}), 8), (4, 4)):
        controller = Controller(policy)
        controller.load_state_dict(saved)
        assert (controller.bits, controller.epoch) == (bits, 1)
        again = Controller(policy)
        again.load_state_dict(controller.state_dict())
        assert again.bits == bits
    before.step({"train_loss": math.nan})  # which no policy sees
    after = Controller(8)
    after.load_state_dict(before.state_dict())
    assert (after.bits, after.epoch) == (8, 2) and not after.history[-1].usable
    before.load_state_dict(saved)
    own = Controller(4, nan_patience=7)  # the same policy: what was recorded stays
    own.load_state_dict(saved)
    assert own.history == before.history
    fresh = Controller(32)
    fresh.load_state_dict(Controller(4).state_dict())  # saved before the first epoch
    assert fresh.bits == 32
    accuracy = Controller(StepFunction())  # which this history does not have
    accuracy.load_state_dict(saved)
    assert accuracy.bits == 4 and "the saved level stays" in caplog.text


def test_nan_holds_then_releases_until_metrics_are_finite(caplog):
    controller = ladder(nan_patience=3)
    values = [0.1, math.nan, math.inf, math.nan, math.nan, 0.1, math.nan, 0.6]
    assert [controller.step(metrics(v)) for v in values] == [2, 2, 2, 32, 32, 2, 2, 4]
    said = [text.rpartition(": ")[2] for text in caplog.messages]
    assert said == [*["the level stays"] * 2, *["nothing is compressed until all are finite"] * 2, "the level stays"]


class Broken(Policy):
    def __init__(self, answer):
        self.answer = answer

    @classmethod
    def always(cls, answer):
        policy = cls(answer)
        policy.decide = lambda history: answer
        return policy

    def decide(self, history):
        if history and isinstance(self.answer, Exception):
            raise self.answer
        return self.answer if history else Decision(4, "start")

    def config(self):
        return {"policy": "Broken"}


@pytest.mark.parametrize("answer", [RuntimeError("boom"), Decision(9, "no such level"), None, (4,)])
def test_a_broken_policy(answer):
    with pytest.raises(ControllerError, match="after epoch 0"):
        Controller(Broken(answer)).step({})
    held = Controller(Broken(answer), on_error="hold")
    assert held.step({}) == 4 and held.history[0].reason.startswith("held")


def test_a_held_epoch_does_not_hold_the_level_for_ever():
    controller = ladder(on_error="hold")
    assert controller.step({"train_loss": 1.0}) == 2  # no val_accuracy
    assert controller.step(metrics(0.6)) == 4


def test_a_first_decision_that_is_no_level():
    with pytest.raises(ValueError, match="first decision.*9"):
        Controller(Broken.always(Decision(9, "")))


def test_state_survives_json_and_a_resumed_controller_goes_on_alike():
    values = [0.1, math.nan, 0.2, 0.3, 0.4, 0.45, 0.46, 0.47, 0.48, 0.6]
    whole, first = ladder(), ladder()
    expected = [whole.step(metrics(v)) for v in values]
    for v in values[:5]:
        first.step(metrics(v))
    second = ladder()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.bits == first.bits and second.epoch == 5
    assert [second.step(metrics(v)) for v in values[5:]] == expected[5:]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])  # noqa: S301
def test_a_copy_goes_on_alike_and_by_itself(copied):
    controller = ladder(nan_patience=3)
    controller.step(metrics(0.1))
    twin = copied(controller)
    assert twin.state_dict() == controller.state_dict()
    assert twin.step(metrics(0.6)) == 4 and (twin.epoch, controller.epoch, controller.bits) == (2, 1, 2)


def test_it_may_be_made_before_horovod_is_initialized():
    code = (
        "import os; os.environ['HOROVOD_SIZE'] = '2'\n"  # as horovodrun's
        "import horovod.torch as hvd\n"
        "from hvd_dyncomp import Controller\n"
        "controller = Controller(4)\n"
        "try:\n    controller.step({})\n"
        "except ValueError as error:\n    assert 'call hvd.init()' in str(error)\n"
        "else:\n    raise SystemExit('step needs the other rank')\n"
        "assert controller.history == []\n"
        "del os.environ['HOROVOD_SIZE']\n"
        "hvd.init()\n"
        "assert controller.step({}) == 4\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_loading_warns_about_another_configuration_and_keeps_its_own(caplog):
    saved = ladder().state_dict()
    other = Controller(Schedule({0: 8}))
    with caplog.at_level(logging.WARNING):
        other.load_state_dict(saved)
    assert "policy='StepFunction'" in caplog.text
    assert other.policy.config()["policy"] == "Schedule"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (({"a": "x"},), r"metrics\['a'\] must be a number, got 'x'"),
        ((None,), "metrics must be"),
        (({1: 2.0},), "metrics must be"),
    ],
)
def test_bad_metrics(arguments, text):
    with pytest.raises(ControllerError, match=text):
        Controller(Static(4)).step(*arguments)


@pytest.mark.parametrize("keywords", [{"epoch": -1}, {"epoch": 1.5}, {"num_samples": -1}, {"num_samples": math.nan}])
def test_bad_keywords(keywords):
    with pytest.raises(ControllerError, match=next(iter(keywords))):
        Controller(Static(4)).step({}, **keywords)


def test_zero_samples_everywhere():
    with pytest.raises(ControllerError, match="num_samples"):
        Controller(Static(4)).step({"a": 1.0}, num_samples=0)


@pytest.mark.parametrize("bits", [0.25, 4, 32])
def test_a_level_is_a_policy(bits):
    controller = Controller(bits)
    assert controller.bits == bits and controller.state_dict() == Controller(Static(bits)).state_dict()


def test_a_state_of_the_former_default_is_replayed_under_this_one(caplog):
    """Six epochs at a level released it; now they do not if the accuracy rises."""
    before = Controller(StepFunction(stagnation="time", loss=None))
    for epoch in range(6):
        before.step({"val_accuracy": 0.1 + 0.01 * epoch})
    assert before.bits == 32
    controller = Controller(StepFunction(loss=None))
    with caplog.at_level(logging.WARNING):
        controller.load_state_dict(before.state_dict())
    assert [record.getMessage() for record in caplog.records] == [
        "Controller: the loaded state has stagnation='time'; this controller keeps 'plateau'"
    ]
    assert controller.bits == 4 and controller.step({"val_accuracy": 0.2}) == 4


def test_what_it_is_can_be_read():
    controller = Controller(StepFunction(levels=(2, 4), thresholds=(0.5,)))
    text = repr(controller)
    assert "StepFunction(levels=[2, 4], thresholds=[0.5], monitor='auto'" in text
    assert text.startswith("Controller(") and text.endswith(": 2 bits in epoch 0)")
