"""Every argument of every public name refuses what it must: with an error that names argument and value.

`hostile.TABLE` is complete: an argument that is not in it fails a test. What one bad rank means to the others is in
on_horovod/on_ranks/test_lockstep.py.
"""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from hostile import QUANTIZER_STATE, TABLE, Says

import hvd_dyncomp
from hvd_dyncomp import (
    Controller,
    ControllerError,
    DynamicQuantizer,
    Record,
    Schedule,
    Static,
    StepFunction,
    kernels,
)

pytestmark = pytest.mark.promise("Every public argument is checked where it is passed.")

EXEMPT = {"Policy.decide"}  # abstract


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def public() -> Iterator[tuple[str, inspect.Signature]]:
    """Every public constructor, method and function, by the name that the table has for it."""
    for name in ("encode_into", "decode_into", "reduce_into"):
        yield f"kernels.{name}", inspect.signature(getattr(kernels, name))
    for name in hvd_dyncomp.__all__:
        found = getattr(hvd_dyncomp, name)
        if inspect.isfunction(found):
            yield name, inspect.signature(found)
        if not isinstance(found, type) or issubclass(found, Exception):
            continue
        if not inspect.isabstract(found):
            yield name, inspect.signature(found)
        for method, function in inspect.getmembers(found, inspect.isfunction):
            if not method.startswith("_") and function.__module__.startswith("hvd_dyncomp"):
                yield f"{name}.{method}", inspect.signature(function)


def test_the_table_has_every_public_argument():
    there = {name: set(signature.parameters) - {"self"} for name, signature in public()}
    there["Averager"] = there["Averager"] - {"arguments"} | there["DynamicQuantizer"]
    wanted = {name: arguments for name, arguments in there.items() if arguments and name not in EXEMPT}
    assert {name: set(call.bad) for name, call in TABLE.items() if call.bad} == wanted
    for name, call in TABLE.items():
        assert all(len(values) >= 3 for values in call.bad.values()), name


@pytest.mark.parametrize("name", TABLE)
def test_good_arguments_are_good(name):
    TABLE[name].function(**TABLE[name].good)


def parts(value: Any) -> Iterator[Any]:
    """The value and all that is in it."""
    yield value
    if isinstance(value, (list, tuple, dict)):
        for part in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            yield from parts(part)


def text(value: Any) -> str:
    """How a value begins in an error message."""
    try:
        return repr(value).replace("\n", " ")[:30]
    except (RuntimeError, ValueError):
        return f"<{type(value).__name__}>"


@pytest.mark.parametrize(
    ("name", "argument"), [(name, argument) for name, call in TABLE.items() for argument in call.bad]
)
def test_a_bad_argument_is_refused_by_name_and_value(name, argument):
    call = TABLE[name]
    expected = (ControllerError,) if name == "Controller.step" else (ValueError, TypeError)
    for value in call.bad[argument]:
        with pytest.raises(expected) as caught:
            call.function(**{**call.good, argument: value})
            pytest.fail(f"{name} takes {argument}={text(value)}")
        said = str(caught.value)
        assert re.search(rf"\b{argument}\b", said), said
        if not any(isinstance(part, (torch.Tensor, Says)) for part in parts(value)):  # they are described
            assert any(text(part) in said for part in parts(value)), said
        assert len(said) < 1000 and "\n" not in said, said


@pytest.mark.parametrize("value", [np.int64(4), np.uint8(4), np.int32(4)])
def test_whole_numbers_of_numpy_are_whole_numbers(value):
    assert StepFunction(levels=np.array([1, 4]), thresholds=np.array([0.5]), cooldown=value).levels == (1, 4)
    assert Schedule({np.int64(0): value}).config() == {"policy": "Schedule", "levels": [[0, 4]]}
    controller = Controller(Static(value), nan_patience=value)
    assert controller.step({"a": 1}, epoch=value, num_samples=value) == 4 and controller.epoch == 5
    DynamicQuantizer(controller, block_size=np.int64(512), min_numel=value)


@pytest.mark.parametrize(
    "value",
    [1, 0.5, np.float32(0.5), np.float64(0.5), np.array(0.5), np.array([0.5]), torch.tensor(0.5), torch.ones(1)]
    + [torch.tensor(0.5, requires_grad=True), torch.tensor(0.5, dtype=torch.bfloat16), torch.tensor(3)],
)
def test_numbers_of_every_library_are_metrics(value):
    controller = Controller(Static(4))
    controller.step({"a": value}, num_samples=value)
    assert controller.history[0].metrics == {"a": value.item() if hasattr(value, "item") else value}


def test_what_the_caller_changes_later_changes_nothing():
    levels, thresholds, schedule, metrics = [4, 8], [0.5], {0: 4}, {"a": 1.0}
    policy, scheduled, controller = StepFunction(levels, thresholds), Schedule(schedule), Controller(Static(4))
    record = Record(0, metrics)
    controller.step(metrics)
    levels[0], thresholds[0], schedule[0], metrics["a"] = 16, 2.0, 32, 2.0
    assert policy.levels == (4, 8) and policy.thresholds == (0.5,) and scheduled.levels == {0: 4}
    assert controller.history[0].metrics == record.metrics == {"a": 1.0}

    state = controller.state_dict()
    other = Controller(Static(4))
    other.load_state_dict(state)
    state["history"][0]["metrics"]["a"] = 3.0
    state["history"].clear()
    assert other.state_dict() == controller.state_dict()

    state = {**QUANTIZER_STATE, "residuals": {"a": torch.zeros(3)}}
    quantizer = DynamicQuantizer()
    quantizer.load_state_dict(state)
    state["residuals"]["a"] += 1
    state["residuals"].clear()
    assert torch.equal(quantizer.state_dict()["residuals"]["a"], torch.zeros(3))


def test_a_state_that_is_refused_changes_nothing():
    controller, quantizer = Controller(Static(4)), DynamicQuantizer(auto_level=True)
    controller.step({"a": 1.0})
    quantizer.load_state_dict(QUANTIZER_STATE)
    quantizer.meter.at(0, 4).steps = 7
    for owner, name in ((controller, "Controller"), (quantizer, "DynamicQuantizer"), (quantizer.meter, "Meter")):
        before = str(owner.state_dict())
        for state in TABLE[f"{name}.load_state_dict"].bad["state"]:
            with pytest.raises((ValueError, TypeError)):
                owner.load_state_dict(state)
        assert str(owner.state_dict()) == before


def test_weights_of_every_size():
    """Only their proportions count, and nothing overflows on the way."""
    for weight in (5e-324, 1.0, 1.7e308):
        controller = Controller(Static(4))
        controller.step({"a": 1e308, "b": 0.7}, num_samples=weight)
        assert controller.history[0].metrics == {"a": 1e308, "b": 0.7}
