"""All ranks compress the same model, or all hear why not."""

import re
import time

import pytest
import torch
import torch.distributed as dist
from problem import Linear, assert_means, gradients
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import LockstepError, ddp

pytestmark = pytest.mark.promise("If `compress` fails on one rank, every rank raises an error.")


def model(value: float, group=None, **arguments) -> DistributedDataParallel:
    module = Linear(**arguments)
    with torch.no_grad():
        for i, parameter in enumerate(module.values):
            parameter += value + i
    return DistributedDataParallel(module, process_group=group)


@pytest.fixture(params=["first", "later"])
def group(request):
    """Each rank hears of the others' errors in the first call of a group, which connects them, and in later ones."""
    made = dist.new_group()
    if request.param == "later":
        ddp.transport(made)
    return made


def assert_compresses(one: DistributedDataParallel, group) -> None:
    ddp.compress(one, 16, block_size=64)
    one(0).backward()
    assert_means(gradients(one), one.module.mean(0), 16)


def test_another_order_on_another_rank(group, rank, size):
    pair = [model(1, group), model(2, group)]
    odd = rank == size - 1
    for _ in range(2):  # later calls meet, too
        for one in reversed(pair) if odd else pair:
            with pytest.raises(LockstepError) as caught:
                ddp.compress(one, 16)
            assert f"parameter values.0 has different values on rank 0 and on rank {size - 1}" in str(caught.value)
            assert "in the same order on every rank" in str(caught.value)
    for one in pair:
        assert_compresses(one, group)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"sizes": (5000, 2048, 1031)}, "4 parameters on rank 0, 3 on rank {}"),
        (
            {"dtype": torch.float64},
            "values.0 (torch.float32, shape [5000]) on rank 0, but values.0 (torch.float64, shape [5000]) on rank {}",
        ),
        (
            {"sizes": (5000, 7, 1031, 10)},
            "values.1 (torch.float32, shape [2048]) on rank 0, but values.1 (torch.float32, shape [7]) on rank {}",
        ),
    ],
)
def test_another_model_on_another_rank(other, text, rank, size):
    pair = [model(1), model(1, **other)]
    with pytest.raises(LockstepError) as caught:
        ddp.compress(pair[rank == size - 1], 16)
    assert text.format(size - 1) in str(caught.value)


def test_a_checkpoint_that_one_rank_has_loaded(rank, size):
    one = model(1)
    if rank == size - 1:
        with torch.no_grad():
            one.module.values[2][1030] += 1
    with pytest.raises(LockstepError, match=r"values.2 has different values .* load checkpoints on every rank"):
        ddp.compress(one, 16)


def test_every_kind_of_value():
    """Parameters of all dtypes and layouts, and one without values."""
    module = nn.Module()
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.complex64)
    module.values = nn.ParameterList([nn.Parameter(torch.ones(3, 2, dtype=kind).t()) for kind in kinds])
    module.number = nn.Parameter(torch.tensor(1.0))
    module.image = nn.Parameter(torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last))
    module.none = nn.Parameter(torch.ones(0, 3))
    ddp.compress(DistributedDataParallel(module), 4)


def wrong(one: DistributedDataParallel, kind: str) -> dict:
    """Arguments of `compress` that fail; or the model is made such that it does."""
    if kind == "hook":
        one.register_comm_hook(None, lambda state, bucket: None)
    elif kind == "built-in hook":
        one._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    elif kind == "optimizer in backward":
        _apply_optimizer_in_backward(torch.optim.SGD, one.parameters(), {"lr": 0.1})
    elif kind == "skip":
        return {"skip": lambda name, parameter: 1 / 0}
    arguments = {"name": {"levels": 3}, "level": {"controller": 5.5}}
    return arguments.get(kind, {"block_size": 100} if kind == "setting" else {})


@pytest.mark.parametrize(
    ("kind", "error", "text"),
    [
        ("hook", ValueError, "the model has a communication hook already"),
        ("built-in hook", ValueError, "the model has a communication hook already"),
        ("optimizer in backward", ValueError, "the model's optimizer steps within backward"),
        ("name", TypeError, "compress takes no argument levels"),
        ("level", ValueError, "controller must be one of the levels"),
        ("setting", ValueError, "block_size must be a power of two"),
        ("skip", ZeroDivisionError, "division by zero"),
    ],
)
def test_what_is_wrong_on_one_rank_is_said_on_all(kind, error, text, group, rank, size):
    for odd in range(size):
        one = model(1, group)
        arguments = {"controller": 16, **(wrong(one, kind) if rank == odd else {})}
        with pytest.raises(error if rank == odd else LockstepError) as caught:
            ddp.compress(one, **arguments)
        assert text in str(caught.value)
        if rank != odd:
            assert str(caught.value).startswith(f"rank {odd} cannot compress its model: {error.__name__}: ")
    assert_compresses(model(2, group), group)


def test_a_name_of_torch_that_is_gone_is_said_on_all_ranks(rank, monkeypatch):
    """As in torch 2.2, which has no `_use_python_reducer`."""
    one = model(1)
    if rank == 0:
        monkeypatch.setattr("hvd_dyncomp.ddp.model._NAMES", ("_comm_hooks", "_long_gone"))
    kind = RuntimeError if rank == 0 else LockstepError
    with pytest.raises(
        kind, match=f"DistributedDataParallel of torch {re.escape(torch.__version__)} has no '_long_gone'"
    ):
        ddp.compress(one, 4)


def test_a_rank_that_steps_the_controller_alone(rank, caplog, monkeypatch):
    """It says so, once."""
    monkeypatch.setattr("hvd_dyncomp.controller.LATE_SECONDS", 0.3)
    quantizer = ddp.compress(one := model(1), 16)
    one(0).backward()
    if rank > 0:
        time.sleep(1.5)
    assert quantizer.controller.step({"accuracy": 0.5}) == 16
    said = [record.getMessage() for record in caplog.records if "has waited" in record.getMessage()]
    assert len(said) == (rank == 0), said
    for line in said:
        assert "rank 0 has waited 0.3 s in Controller.step for other ranks: every rank must" in line
        assert "use 'if torch.distributed.get_rank() == 0:' only for code that prints" in line
    dist.barrier()


def test_an_optimizer_in_backward_of_before():
    """DistributedDataParallel then registers a hook for it."""
    module = Linear()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    with pytest.raises(ValueError, match="the model's optimizer steps within backward"):
        ddp.compress(DistributedDataParallel(module), 4)
