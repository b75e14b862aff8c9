"""States come from files: whatever is in them, loading them works or is a ValueError, and then nothing has changed."""

import copy

import horovod.torch as hvd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import Controller, DynamicQuantizer, Meter, StepFunction
from hvd_dyncomp.auto_level import AutoLevel


@pytest.fixture(autouse=True, scope="module")
def initialized():
    hvd.init()


def deep() -> list:
    inner: list = []
    for _ in range(100_000):
        inner = [inner]
    return inner


class Unspeakable:
    """An object of no use, which cannot even be shown, copied or asked."""

    def __repr__(self):
        raise RuntimeError("no")

    def __deepcopy__(self, memo):
        raise LookupError("no")

    def __bool__(self):
        raise ArithmeticError("no")

    def __eq__(self, other):
        raise AttributeError("no")

    __hash__ = None


NASTY = {
    "nothing": lambda: None,
    "a large number": lambda: 10**400,
    "a negative number": lambda: -1,
    "no number": lambda: float("nan"),
    "text": lambda: "residuals",
    "bytes": lambda: b"\x00",
    "a list": lambda: [1, [2]],
    "lists within lists": deep,
    "a dict": lambda: {1: {2: 3}},
    "an empty dict": dict,
    "a tensor without memory": lambda: torch.zeros(3, device="meta"),
    "a sparse tensor": lambda: torch.eye(3).to_sparse(),
    "complex numbers": lambda: torch.zeros(3, dtype=torch.complex64),
    "a tensor of no dimension": lambda: torch.tensor(1.0),
    "an empty tensor": lambda: torch.zeros(0),
    "a tensor of NaN": lambda: torch.full((3,), float("nan")),
    "an object": Unspeakable,
}


def quantizer_state() -> dict:
    shard = {"layout": 5, "first": 0, "carries": True, "values": torch.ones(64)}
    traffic = Meter()
    traffic.at(0, 4).steps += 3
    return {
        "rank": None,
        "world_size": 2,
        "factor": 0.5,
        "hosts": [[0], [1]],
        "residuals": {"a": torch.ones(3)},
        "shard_residuals": {"bucket": shard},
        "steps": 3,
        "meter": traffic.state_dict(),
        "auto_level": AutoLevel().state_dict(),
    }


def controller_state() -> dict:
    controller = Controller(StepFunction())
    controller.step({"val_accuracy": 0.5, "train_loss": 1.0})
    return controller.state_dict()


LOADED = {
    "quantizer": (quantizer_state, lambda: DynamicQuantizer(auto_level=True)),
    "controller": (controller_state, Controller),
    "meter": (lambda: quantizer_state()["meter"], Meter),
}


def paths(value, path=()):
    """Of everything in a state, itself included."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from paths(inner, (*path, key))


def replaced(state, path, by):
    if not path:
        return by
    state = copy.deepcopy(state)
    inner = state
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = by
    return state


@pytest.mark.parametrize("kind", LOADED)
def test_a_state_of_its_own_is_loaded(kind):
    state, make = LOADED[kind][0](), LOADED[kind][1]()
    make.load_state_dict(state)


@pytest.mark.parametrize("kind", LOADED)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_anything_else_is_a_value_error(kind, data):
    state, loaded = LOADED[kind][0](), LOADED[kind][1]()
    before = str(loaded.state_dict())
    path = data.draw(st.sampled_from(list(paths(state))), label="path")
    what = data.draw(st.sampled_from(list(NASTY)), label="replaced by")
    try:
        loaded.load_state_dict(replaced(state, path, NASTY[what]()))
    except ValueError:
        assert str(loaded.state_dict()) == before
