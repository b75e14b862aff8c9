"""Mistakes that part the replicas: each is an error on every rank in the next epoch. Ordinary loops are none."""

import contextlib
import gc
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from problem import Linear, distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from hvd_dyncomp import Controller, LockstepError, ddp

pytestmark = pytest.mark.promise("If replicas differ, an error on every rank names the parameter.")


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 4))


def wrapped(module: nn.Module) -> tuple[DistributedDataParallel, ddp.Quantizer]:
    model = DistributedDataParallel(module, bucket_cap_mb=0.001, find_unused_parameters=True)
    return model, ddp.compress(model, 16, block_size=64)


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return model(torch.randn(16, 8, generator=generator)).square().mean()


def train(model: nn.Module, parameters=None, context: Callable = contextlib.nullcontext) -> None:
    optimizer = torch.optim.SGD(model.parameters() if parameters is None else parameters, lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        with context():
            loss_of(model, step).backward()
        optimizer.step()


def lbfgs(model: nn.Module, seen: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """A step by losses as `seen`."""
    # With both losses the line search takes two evaluations here; with another number ranks would wait for each other.
    optimizer = torch.optim.LBFGS(model.parameters(), lr=5, max_iter=1, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return seen(loss.detach())

    optimizer.step(closure)


def lbfgs_on_local_losses(model, module):
    lbfgs(model, lambda loss: loss)


def a_state_assigned_after_wrapping(model, module):
    module.load_state_dict({name: value.clone() for name, value in module.state_dict().items()}, assign=True)
    train(model)


def converted_after_wrapping(model, module):
    module.double().float()
    train(model)


def steps_in_hooks(model, module):
    def step(parameter):
        parameter.data.sub_(parameter.grad, alpha=0.1)

    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    loss_of(model, 0).backward()


def a_parametrization_added_later(model, module):
    parametrizations.weight_norm(module[0])
    train(model)


def a_module_unfrozen_later(model, module):
    module[2].weight.requires_grad_(True)
    train(model)


def a_module_added_later(model, module):
    module.append(nn.Linear(4, 4))
    for parameter in module[3].parameters():
        dist.broadcast(parameter.data, 0)
    train(model)


def all_forwards_in_no_sync(model, module):
    train(model, context=model.no_sync)


MISTAKES = [  # and whether the model exchanges anything afterwards
    (lbfgs_on_local_losses, "0.weight", True),
    (a_state_assigned_after_wrapping, "0.weight", False),
    (converted_after_wrapping, "0.weight", False),
    (steps_in_hooks, "0.weight", True),
    (a_parametrization_added_later, "0.parametrizations.weight.original0", True),
    (a_module_unfrozen_later, "2.weight", True),
    (a_module_added_later, "3.weight", True),
    (all_forwards_in_no_sync, "0.weight", False),
]


@pytest.mark.parametrize(("mistake", "name", "exchanges"), MISTAKES, ids=[mistake.__name__ for mistake, *_ in MISTAKES])
def test_a_mistake_is_an_error_on_every_rank(mistake, name, exchanges, rank, caplog):
    """In the next epoch. Where nothing is exchanged, a warning asks for the check."""
    module = network()
    module[2].weight.requires_grad_(mistake is not a_module_unfrozen_later)
    model, quantizer = wrapped(module)
    loss_of(model, 9).backward()
    mistake(model, module)
    quantizer.controller.step({})
    checks = [quantizer.check_replicas, lambda: loss_of(model, 10).backward()]
    if not exchanges:
        mistake(model, module)
        assert "quantizer.check_replicas() compares" not in caplog.text
        quantizer.controller.step({})
        assert ("quantizer.check_replicas() compares" in caplog.text) == (rank == 0)
        checks.pop()
    for check in checks:
        with pytest.raises(LockstepError, match=f"parameter {name} is not the same on rank 0 and rank 1"):
            check()


@pytest.mark.parametrize("bits", [0.25, 4, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_loops_are_none(bits, dtype, rank):
    model, quantizer = distributed(bits, module=Linear(dtype=dtype))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(2):
        for seed in range(3):
            model(seed + 10 * epoch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        quantizer.controller.step({"loss": rank}, num_samples=rank)
    model(30).backward()
    model.module.values[0].requires_grad_(False)
    quantizer.check_replicas()


@pytest.mark.parametrize("bits", [0.25, 4, 32])
def test_nans_of_other_bits_on_each_rank_are_none(bits, rank):
    """Rank 0's have no sign, the others' have one."""
    model, quantizer = distributed(bits)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    nan = torch.tensor(torch.nan)
    for seed in range(2):
        optimizer.zero_grad()
        (model(seed) * (nan if rank == 0 else -nan)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    assert all(parameter.isnan().all() for parameter in model.parameters())
    quantizer.controller.step({})
    model(2).backward()


def test_lbfgs_on_mean_losses_is_none(size):
    model, quantizer = wrapped(network())

    def mean(loss: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(loss)
        return loss / size

    lbfgs(model, mean)
    quantizer.controller.step({})
    loss_of(model, 1).backward()


def test_what_the_model_is_told_to_ignore_may_differ(rank):
    module = network()
    module.local = nn.Parameter(torch.tensor(float(rank)))
    module.frozen = nn.Parameter(torch.tensor(float(rank)), requires_grad=False)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, ["local"])
    model, quantizer = wrapped(module)
    module.frozen.data.fill_(float(rank))
    for _ in range(2):
        train(model)
        quantizer.controller.step({})
    quantizer.check_replicas()


def test_a_model_that_only_some_ranks_have_deleted_yet(rank):
    """Its quantizer is kept, as for its meter; the next model has the same controller."""
    controller = Controller(4, transport=ddp.transport())
    model, quantizer = distributed(controller)
    following, _ = distributed(controller)
    for each in (model, following):
        each(0).backward()
    if rank == 0:
        del model, each
        gc.collect()
    assert (quantizer.trained() == []) == (rank == 0)
    controller.step({})
    following(1).backward()


@pytest.mark.parametrize("less", [0, 1])
def test_a_model_in_a_group_of_its_own(less, rank, size):
    members = range(size - less)
    group, controller = dist.new_group(list(members)), Controller(4, transport=ddp.transport())
    if rank in members:
        model = DistributedDataParallel(Linear((3000,)), process_group=group)
        quantizer = ddp.compress(model, controller)
        model(0).backward()
        model.module.values[0].data.fill_(float(rank))
    controller.step({})
    if rank in members and len(members) > 1:
        for check in (quantizer.check_replicas, model(1).backward):
            with pytest.raises(LockstepError, match="parameter values.0 is not the same"):
                check()
    dist.barrier()


def test_a_model_wrapped_and_compressed_again(rank):
    """Its first step is not compared: whoever wraps it has made its values equal. Later ones are."""
    controller = Controller(4, transport=ddp.transport())
    model, _ = distributed(controller)
    model(0).backward()
    model.module.values[0].data.fill_(float(rank))
    again = DistributedDataParallel(model.module)  # which broadcasts the values of rank 0
    ddp.compress(again, controller, block_size=64)
    controller.step({})
    again(1).backward()
    model.module.values[0].data.fill_(float(rank))
    controller.step({})
    with pytest.raises(LockstepError, match="parameter values.0 is not the same"):
        again(2).backward()
