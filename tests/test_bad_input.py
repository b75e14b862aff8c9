"""Every argument of every public name refuses what it must: with an error that names argument and value.

hostile.py says what each may be; an argument that it does not know fails a test. What one bad rank means to the others
is in on_horovod/on_ranks/test_lockstep.py.
"""

import inspect
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import horovod.torch as hvd
import numpy as np
import pytest
import torch
from hostile import CALLED, GOOD, OWNERS, STATE, Says, empty, everything, known, spoiled
from hypothesis import given, settings
from hypothesis import strategies as st

import hvd_dyncomp
from hvd_dyncomp import Controller, ControllerError, DynamicQuantizer, Record, Schedule, Static, StepFunction, kernels
from hvd_dyncomp.exchange.settings import Settings
from hvd_dyncomp.sessions.advice import GONE

pytestmark = pytest.mark.promise("Every public argument is checked where it is passed.")

EXTREME = (st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers(), st.decimals(), st.fractions())
KERNELS = ("encode_into", "decode_into", "reduce_into")


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def named(signature: inspect.Signature) -> inspect.Signature:
    """Without what takes all other arguments, and refuses them."""
    return signature.replace(parameters=[one for one in signature.parameters.values() if one.kind != one.VAR_KEYWORD])


def public() -> dict[str, inspect.Signature]:
    """Every public constructor, method and function with arguments; "X.y" is a method."""
    found = {f"kernels.{name}": getattr(kernels, name) for name in KERNELS}
    for name in hvd_dyncomp.__all__:
        one = getattr(hvd_dyncomp, name)
        if isinstance(one, type) and not issubclass(one, Exception) and not inspect.isabstract(one):
            own = inspect.getmembers(one, lambda each: inspect.isfunction(each) and not each.__name__.startswith("_"))
            found |= {name: one} | {f"{name}.{method}": function for method, function in own}
        elif inspect.isfunction(one):
            found[name] = one
    found["Averager"] = hvd_dyncomp.DynamicQuantizer  # its other arguments are passed on
    signatures = {name: named(inspect.signature(one)) for name, one in found.items()}
    return {name: signature for name, signature in signatures.items() if set(signature.parameters) - {"self"}}


PUBLIC = public()
ARGUMENTS = [(call, name) for call, signature in PUBLIC.items() for name in signature.parameters if name != "self"]


class Called:
    """One call: on what, and what it raised."""

    def __init__(self, call: str, **arguments: Any):
        kind, _, method = call.partition(".")
        self.owner = OWNERS.get(kind, getattr(hvd_dyncomp, kind, None))() if method else None
        self.before, self.error = self.state(), None
        try:
            (getattr(self.owner, method) if method else CALLED.get(call) or getattr(hvd_dyncomp, call))(**arguments)
        except Exception as error:  # noqa: BLE001  # whatever it is
            self.error = error

    def state(self) -> str:
        return str(self.owner.state_dict()) if hasattr(self.owner, "state_dict") else ""


def names(call: str) -> tuple[str, str]:
    """How hostile.py calls what has the arguments: by the method, or by the class."""
    return call.partition(".")[2], call.partition(".")[0]


def good(call: str) -> dict[str, Any]:
    """Arguments that it takes: those that it needs, and those that have parts."""
    found = {each: GOOD.get(known(GOOD, each, names(call))) for each in PUBLIC[call].parameters if each != "self"}
    needed = [each for each in found if PUBLIC[call].parameters[each].default is inspect.Parameter.empty]
    return {each: value for each, value in found.items() if value is not None or each in needed}


@pytest.mark.parametrize("call", sorted(PUBLIC.keys() - {"DynamicQuantizer.attach"}))
def test_good_arguments_are_good(call):
    assert Called(call, **good(call)).error is None


def parts(value: Any, depth: int = 6) -> Iterator[Any]:
    """The value and all that is in it."""
    yield value
    inner = [*value, *value.values()] if isinstance(value, dict) else value
    if depth and isinstance(inner, (list, tuple, bytes, bytearray, np.ndarray)) and getattr(inner, "shape", 1) != ():
        for part in inner:
            yield from parts(part, depth - 1)


def text(value: Any) -> str:
    """How a value begins in an error message."""
    try:
        return repr(value).replace("\n", " ")[:30]
    except Exception:  # noqa: BLE001
        return f"<{type(value).__name__}>"


# In messages by their class, not by all that they hold.
DESCRIBED = (torch.Tensor, torch.optim.Optimizer, Says)


def refuses(call: str, name: str, values: Sequence[Any]) -> None:
    """Checks that a call refuses all that is bad of these values, and of what becomes of its arguments with them."""
    arguments = good(call)
    expected = ControllerError if call == "Controller.step" else (ValueError, TypeError)
    for value in spoiled(name, names(call), arguments.get(name), values):
        done = Called(call, **{**arguments, name: value})
        assert isinstance(done.error, expected), f"{call} takes {name}={text(value)}: {done.error!r}"
        said = str(done.error)
        assert re.search(rf"\b{name}\b", said), said
        if not empty(value) and not any(isinstance(part, DESCRIBED) for part in parts(value)):
            assert any(text(part) in said for part in parts(value)), said
        assert len(said) < 1000 and "\n" not in said, said
        assert call == "Averager.mean_" or done.state() == done.before, f"{name}={text(value)} has changed something"


@pytest.mark.parametrize(("call", "name"), ARGUMENTS)
def test_a_bad_argument_is_refused_by_name_and_value_and_changes_nothing(call, name):
    refuses(call, name, everything())


@pytest.mark.parametrize("name", [name for name in GONE if name not in {each.name for each in fields(Settings)}])
def test_an_argument_that_is_gone_is_a_type_error_that_says_what_to_do(name):
    for make in (DynamicQuantizer, lambda **given: hvd_dyncomp.Averager([("a", torch.zeros(3))], **given)):
        with pytest.raises(TypeError, match=f" no longer takes {name}: {re.escape(GONE[name])}$"):
            make(**{name: True})
    with pytest.raises(TypeError, match="^DynamicQuantizer takes no argument fp61_skipped$"):
        DynamicQuantizer(fp61_skipped=True)


@settings(max_examples=300, deadline=None)
@given(argument=st.sampled_from(ARGUMENTS), value=st.one_of(EXTREME))
def test_any_bad_scalar_is_refused(argument, value):
    refuses(*argument, [value])


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

    state = {**STATE, "residuals": {"a": torch.zeros(3).bfloat16()}}
    quantizer = DynamicQuantizer()
    quantizer.load_state_dict(state)
    state["residuals"]["a"] += 1
    state["residuals"].clear()
    assert torch.equal(quantizer.state_dict()["residuals"]["a"], torch.zeros(3))


def test_weights_of_every_size():
    """Only their proportions count, and nothing overflows on the way."""
    for weight in (5e-324, 1.0, 1.7e308):
        controller = Controller(Static(4))
        controller.step({"a": 1e308, "b": 0.7}, num_samples=weight)
        assert controller.history[0].metrics == {"a": 1e308, "b": 0.7}
