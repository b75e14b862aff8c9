"""When the optimizer of a compressed model leaves its momentum out."""

import contextlib
import copy

import pytest
import torch
from problem import Linear, gradients, same_on_all_ranks
from process_group import BACKEND
from torch.nn.parallel import DistributedDataParallel

import hvd_dyncomp
from hvd_dyncomp import LockstepError, ddp


@pytest.mark.parametrize(
    ("momentum", "bits", "said"),
    [(0.9, 0.25, "SGD has a momentum of 0.9"), (0, 0.25, ""), (0.9, 1, ""), (0.9, 4, "")],
)
def test_momentum_at_few_bits_is_warned_of_once(momentum, bits, said, rank, caplog):
    """Of the optimizer that steps these parameters: nobody has named it, and another one steps before it."""
    model = DistributedDataParallel(Linear())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=momentum)
    other = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.05, momentum=0.7)
    ddp.compress(model, bits)
    for seed in range(3):
        other.step()
        model(seed).backward()
        optimizer.step()
    records = [record.getMessage() for record in caplog.records if record.name == "hvd_dyncomp.sessions.session"]
    assert [said in record for record in records] == [True] * (rank == 0 and bool(said)), records


def test_optimizers_are_found_when_they_are_made_later_and_share_a_model():
    model = DistributedDataParallel(Linear())
    ddp.compress(model, hvd_dyncomp.Schedule({0: 1}))
    first, *rest = model.parameters()
    optimizers = [hvd_dyncomp.less_momentum(torch.optim.SGD(part, lr=0.05, momentum=0.9)) for part in ([first], rest)]
    elsewhere = hvd_dyncomp.less_momentum(torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.05))
    model(0).backward()
    assert all(optimizer.left for optimizer in optimizers) and not elsewhere.left


@pytest.mark.promise("With `less_momentum`, all ranks change the momentum in the same steps.")
@pytest.mark.skipif(BACKEND != "gloo", reason="over NCCL all ranks reach models in one order")
def test_an_optimizer_of_two_models_that_ranks_reach_in_another_order(rank):
    """It leaves the momentum of both out; once one is wrapped anew and not compressed, that of the other one."""
    models = [DistributedDataParallel(Linear()) for _ in range(2)]
    quantizers = [ddp.compress(model, 0.25) for model in models]
    weights = [model.module.values[0] for model in models]
    parameters = [parameter for model in models for parameter in model.parameters()]
    optimizer = hvd_dyncomp.less_momentum(torch.optim.SGD(parameters, lr=0.01, momentum=0.5))
    for seed in range(4):
        if seed == 3:
            for quantizer in quantizers:
                quantizer.check_replicas()
            models[0] = DistributedDataParallel(models[0].module)
        optimizer.zero_grad()
        losses = [models[index](seed + index) for index in ((0, 1) if rank else (1, 0))]
        sum(losses).backward()
        before = [weight.detach().clone() for weight in weights]
        optimizer.step()
        for rate, then, weight in zip((0.01 if seed == 3 else 0.02, 0.02), before, weights, strict=True):
            torch.testing.assert_close(then - weight.detach(), rate * weight.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.promise("With `less_momentum`, all ranks change the momentum in the same steps.")
def test_ranks_that_differ_in_less_momentum_are_found_by_their_replicas(rank):
    model = DistributedDataParallel(Linear())
    quantizer = ddp.compress(model, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if rank == 1:
        hvd_dyncomp.less_momentum(optimizer)
    for seed in range(2):
        model(seed).backward()
        optimizer.step()
    quantizer.controller.step({})
    with pytest.raises(LockstepError, match="is not the same on rank 0 and rank 1"):
        model(2).backward()


def test_local_steps_of_a_compressed_model_keep_their_momentum(rank):
    """Without an exchange, as `no_sync` makes them; and the step after an exchange, too."""
    models = [DistributedDataParallel(Linear()) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9) for model in models]
    for model in models:
        ddp.compress(model, 0.25)
    hvd_dyncomp.less_momentum(optimizers[0])
    for seed in range(9):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            with contextlib.nullcontext() if seed % 3 == 2 else model.no_sync():
                model(seed).backward()
            optimizer.step()
    assert all(map(torch.equal, *(model.parameters() for model in models)))


def test_an_optimizer_that_steps_no_more_is_no_disagreement(rank):
    """It may live on some ranks longer than on others: a scheduler makes a cycle, and Python collects it some time."""
    model = DistributedDataParallel(Linear())
    ddp.compress(model, 1)
    replaced = [hvd_dyncomp.less_momentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))]
    model(0).backward()
    replaced[0].step()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model(1).backward()
    optimizer.step()
    if rank == 0:
        replaced.clear()
    for seed in range(2, 4):
        model(seed).backward()
        optimizer.step()
    again = DistributedDataParallel(model.module)
    ddp.compress(again, 1)
    again(4).backward()
    assert same_on_all_ranks(gradients(again))


@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_a_rank_that_joins_is_no_disagreement(bits, batches, rank):
    """It steps no optimizer. What goes wrong then ends the loop on all ranks."""
    model = DistributedDataParallel(Linear())
    quantizer = ddp.compress(model, bits)
    optimizer = hvd_dyncomp.less_momentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    for _ in range(2):
        with model.join():
            for seed in range(batches + 3 * (rank == 1)):
                optimizer.zero_grad()
                model(seed).backward()
                optimizer.step()
    assert same_on_all_ranks(list(model.module.values))
    quantizer._steps += rank
    with pytest.raises(LockstepError, match="rank 0 has step"), model.join():
        for seed in range(batches + 3 * (rank == 1)):
            optimizer.zero_grad()
            model(seed).backward()
            optimizer.step()


def test_states_are_loaded_after_an_error_that_came_after_the_step_on_some_ranks(rank):
    model = DistributedDataParallel(Linear())
    quantizer = ddp.compress(model, 1)
    optimizer = hvd_dyncomp.less_momentum(torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    state = copy.deepcopy(quantizer.state_dict())
    model(0).backward()
    if rank == 0:
        optimizer.step()
    quantizer.load_state_dict(state)
    for seed in range(2):
        model(seed).backward()
        optimizer.step()


def test_an_optimizer_that_is_replaced_and_lives_on_is_no_disagreement(rank):
    """On some ranks: as the best so far, or in a logger."""
    model = DistributedDataParallel(Linear())
    ddp.compress(model, 1)
    kept = []
    for seed in range(4):
        if seed % 2 == 0:
            optimizer = hvd_dyncomp.less_momentum(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
            kept += [optimizer] * (rank == 1)
        optimizer.zero_grad()
        model(seed).backward()
        optimizer.step()
    assert same_on_all_ranks(list(model.module.values))
