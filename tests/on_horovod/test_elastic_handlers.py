"""What `hvd.elastic.TorchState` keeps of a quantizer and a controller. With ranks that go: test_elastic.py."""

import copy
import pickle

import horovod.torch as hvd
import pytest
import torch

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule


@pytest.fixture(autouse=True, scope="module")
def horovod():
    hvd.init()


def owing(value: float, steps: int, rank: int | None = 0) -> dict:
    """The state of a quantizer that owes something."""
    quantizer = DynamicQuantizer()
    quantizer.meter.at(0, 4).steps = steps
    shard = {"first": 0, "carries": True, "values": torch.full((64,), value).bfloat16()}
    shard["slots"] = {"a": {"start": 0, "order": [0]}}
    own = {"residuals": {"a": torch.full((130,), value).bfloat16()}, "shard_residuals": {"a": shard}}
    return {**quantizer.state_dict(), **own, "rank": rank, "world_size": 2, "steps": steps}


def text(state: dict) -> str:
    return str({**state, "rank": None})


def kept() -> tuple[hvd.elastic.TorchState, DynamicQuantizer, Controller]:
    quantizer, controller = DynamicQuantizer(), Controller(Schedule({0: 4, 1: 8, 2: 16}))
    quantizer.load_state_dict(owing(1.0, 3))
    controller.step({})
    return hvd.elastic.TorchState(quantizer=quantizer, controller=controller), quantizer, controller


def test_a_reset_goes_back_to_what_was_committed():
    state, quantizer, controller = kept()
    before = text(quantizer.state_dict()), controller.state_dict()
    quantizer.load_state_dict(owing(2.0, 5))
    controller.step({})
    assert text(quantizer.state_dict()) != before[0] and controller.bits == 16
    state.restore()
    assert (text(quantizer.state_dict()), controller.state_dict()) == before and controller.bits == 8
    assert quantizer.meter.total().steps == 3


def test_a_reset_goes_on_after_an_error_within_a_step():
    state, quantizer, _ = kept()
    before = text(quantizer.state_dict())
    quantizer._fail(KeyboardInterrupt())  # as after one in a hook
    with pytest.raises(RuntimeError, match="restart all ranks from a checkpoint"):
        quantizer.load_state_dict(owing(2.0, 5))
    state.restore()
    assert text(quantizer.state_dict()) == before


def test_a_commit_moves_what_a_reset_goes_back_to():
    state, quantizer, controller = kept()
    quantizer.load_state_dict(owing(2.0, 5))
    controller.step({})
    state.save()
    before = text(quantizer.state_dict())
    quantizer.load_state_dict(owing(3.0, 7))
    state.restore()
    assert text(quantizer.state_dict()) == before and controller.bits == 16


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])  # noqa: S301
def test_a_copy_owes_what_the_original_owes(copied):
    quantizer = DynamicQuantizer(Controller(Schedule({0: 8})), block_size=128)
    quantizer.load_state_dict(owing(1.0, 3))
    twin = copied(quantizer)
    assert text(twin.state_dict()) == text(quantizer.state_dict()) and twin.controller.bits == 8
    assert twin._arguments == quantizer._arguments and twin.state_dict()["rank"] is None
    twin.load_state_dict(owing(2.0, 5))
    assert quantizer.state_dict()["steps"] == 3


def test_a_quantizer_with_names_of_its_own_cannot_be_copied():
    quantizer = DynamicQuantizer(named_parameters=[("a", torch.nn.Parameter(torch.zeros(3)))])
    with pytest.raises(TypeError, match="named_parameters cannot be pickled"):
        pickle.dumps(quantizer)
