"""Everything that stock Horovod's optimizer can do: the same result as uncompressed, within what the level allows.

A scenario trains something with the compression it is given and returns tensors; it runs once with Horovod's own
`Compression.none` and once with ours. Losses are linear in the parameters, so that gradients do not depend on what
compression did to earlier steps.
"""

from __future__ import annotations

from collections.abc import Callable

import horovod.torch as hvd
import pytest
import torch
from problem import DEVICE, Compress, Linear, assert_close, distribute, level_of, same_on_all_ranks, weights
from torch import Tensor, nn

from hvd_dyncomp import Controller, DynamicQuantizer, Static

pytestmark = pytest.mark.promise("Features of Horovod's optimizer work with compression, within the level's error.")

Scenario = Callable[[Compress], list[Tensor]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def two_steps(compress: Compress, passes: int = 1, **arguments) -> list[Tensor]:
    model = Linear()
    optimizer = distribute(model, compress, **arguments)
    for step in range(2):
        optimizer.zero_grad()
        for turn in range(passes):
            model(10 * step + turn).backward()
        optimizer.step()
    return weights(model)


@scenario
def plain(compress):
    return two_steps(compress)


@scenario
def local_accumulation(compress):
    return two_steps(compress, passes=3, backward_passes_per_step=3)


@scenario
def a_sum(compress):
    return two_steps(compress, op=hvd.Sum)


@scenario
def predivided(compress):
    return two_steps(compress, gradient_predivide_factor=2.0)


@scenario
def two_process_sets_at_once(compress):
    """Even and odd ranks train models of different shapes, under the same parameter names."""
    sets = [hvd.add_process_set(list(range(first, hvd.size(), 2))) for first in (0, 1)]
    try:
        mine = hvd.rank() % 2
        model = Linear((5000, 1031, 10) if mine else (2048, 3000))
        optimizer = distribute(model, compress, process_set=sets[mine])
        for step in range(2):
            optimizer.zero_grad()
            model(step).backward()
            optimizer.step()
        return weights(model)
    finally:
        for process_set in sets:
            hvd.remove_process_set(process_set)


def embedding(compress, **arguments):
    model = nn.Embedding(400, 8, sparse=True, device=DEVICE)
    nn.init.zeros_(model.weight)
    optimizer = distribute(model, compress, **arguments)
    rows = torch.arange(hvd.rank(), 300 + hvd.rank(), device=DEVICE)
    generator = torch.Generator().manual_seed(hvd.rank())
    for _ in range(2):
        optimizer.zero_grad()
        (model(rows) * torch.randn(300, 8, generator=generator).to(DEVICE)).sum().backward()
        optimizer.step()
    return weights(model)


@scenario
def sparse_gradients(compress):
    return embedding(compress)


@scenario
def sparse_gradients_as_dense(compress):
    return embedding(compress, sparse_as_dense=True)


@scenario
def clipping(compress):
    model = Linear()
    optimizer = distribute(model, compress)
    for step in range(2):
        optimizer.zero_grad()
        model(step).backward()
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    return weights(model)


@scenario
def a_closure(compress):
    model = Linear()
    optimizer = distribute(model, compress)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(1)
        loss.backward()
        optimizer.synchronize()
        return loss

    for _ in range(2):
        with optimizer.skip_synchronize():
            optimizer.step(closure)
    return weights(model)


@scenario
def a_parameter_group_added_later(compress):
    """Horovod does not reduce such parameters: every rank moves its own. Ours must not stumble over them."""
    model, later = Linear(), Linear((3000,))
    optimizer = distribute(model, compress)
    for step in range(2):
        optimizer.zero_grad()
        (model(step) + later(step)).backward()
        optimizer.step()
        if step == 0:
            optimizer.add_param_group({"params": list(later.parameters()), "lr": 1.0})
    return weights(model, later)


@scenario
def frozen_and_unfrozen(compress):
    model = Linear()
    model.values[1].requires_grad_(False)  # from the beginning: Horovod never hears of it
    optimizer = distribute(model, compress)
    for step, frozen in enumerate([False, True, False]):
        optimizer.zero_grad()
        model.values[0].requires_grad_(not frozen)
        model(step, (2, 3) if frozen else (0, 2, 3)).backward()
        optimizer.step()
    return weights(model)


@scenario
def tied_parameters(compress):
    model = nn.Module()
    model.first = nn.Linear(64, 40, bias=False, device=DEVICE)
    model.second = nn.Linear(64, 40, bias=False, device=DEVICE)
    model.second.weight = model.first.weight
    nn.init.zeros_(model.first.weight)
    optimizer = distribute(model, compress)
    torch.manual_seed(hvd.rank())
    loss = (model.first(torch.randn(5, 64, device=DEVICE)) * torch.randn(5, 40, device=DEVICE)).sum()
    loss = loss + (model.second(torch.randn(5, 64, device=DEVICE)) * torch.randn(5, 40, device=DEVICE)).sum()
    loss.backward()
    optimizer.step()
    return weights(model)


@scenario
def unused_on_some_ranks(compress):
    model = Linear()
    optimizer = distribute(model, compress)
    for step in range(3):
        optimizer.zero_grad()
        model(step, (0, 3) if hvd.rank() == step % hvd.size() else (2, 1)).backward()
        optimizer.step()
    return weights(model)


@scenario
def two_models_with_two_optimizers(compress):
    generator, critic = Linear((3000, 10)), Linear((2000, 1500))
    optimizers = [
        distribute(model, compress, prefix=name) for name, model in (("generator.", generator), ("critic.", critic))
    ]
    for step in range(2):
        optimizers[1].zero_grad()
        critic(10 * step).backward()
        optimizers[1].step()
        # A generator learns through its critic, which stays as it is meanwhile.
        optimizers[0].zero_grad()
        critic.requires_grad_(False)
        (generator(10 * step + 1) + critic(10 * step + 1)).backward()
        critic.requires_grad_(True)
        optimizers[0].step()
    return weights(generator, critic)


@scenario
def no_gradient_is_thrown_away(compress):
    """`set_to_none=False`: the same memory in every step."""
    model = Linear()
    optimizer = distribute(model, compress)
    for step in range(3):
        model.zero_grad(set_to_none=False)
        model(step).backward()
        optimizer.step()
    return weights(model)


@scenario
def mixed_precision(compress):
    """Autocast, a scaled loss, unscaling between exchange and update."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 40)).to(DEVICE)
    start = weights(model)
    optimizer = distribute(model, compress, lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=256.0)
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(hvd.rank())).to(DEVICE)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        loss = model(inputs).square().mean()
    scaler.scale(loss).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with optimizer.skip_synchronize():
        scaler.step(optimizer)
    scaler.update()
    return [after - before for after, before in zip(weights(model), start, strict=True)]


@pytest.mark.parametrize("bits", [1, 4, 16, 32])
@pytest.mark.parametrize("name", SCENARIOS)
def test_as_without_compression(name, bits):
    expected = SCENARIOS[name](lambda: hvd.Compression.none)
    got = SCENARIOS[name](lambda: DynamicQuantizer(Controller(Static(bits))))
    for mine, theirs in zip(got, expected, strict=True):
        assert mine.dtype == theirs.dtype
        # Clipping scales small tensors, too, by what the norm of all is.
        assert_close(mine, theirs, bits if name == "clipping" else level_of(mine, bits))


def test_scalars_and_small_tensors_can_be_compressed_as_well():
    model = Linear((1, 3, 7000))
    model.scalar = nn.Parameter(torch.tensor(0.0, device=DEVICE))
    quantizer = DynamicQuantizer(Controller(Static(16)), min_numel=1)
    optimizer = distribute(model, lambda: quantizer)
    (model(1) + 3 * (hvd.rank() + 1) * model.scalar).backward()
    optimizer.step()
    assert model.scalar.item() == pytest.approx(-3 * (hvd.size() + 1) / 2, rel=1e-3)
    assert quantizer.meter.total().saved_fraction > 0
    assert same_on_all_ranks(weights(model), "weights")


def test_sparse_gradients_begin_no_step(rank, caplog):
    """Horovod reduces them by itself, and would never ask for the step's end. Zeros in their place are warned of."""
    table = nn.Embedding(400, 8, sparse=True, device=DEVICE)
    quantizer = DynamicQuantizer(4)
    optimizer = distribute(table, lambda: quantizer)
    quantizer.attach(optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        table(torch.arange(rank, 30, device=DEVICE)).sum().backward()
        optimizer.step()
        assert quantizer.state_dict()["steps"] == 0
    assert caplog.text.count("are sparse: Horovod reduces them as they are") == (rank == 0)


def test_an_overflow_on_one_rank_skips_the_step_on_all(rank):
    model = Linear((3000, 10))
    optimizer = distribute(model, lambda: DynamicQuantizer(Controller(Static(4))))
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=4.0)
    for step in range(4):
        before = weights(model)
        optimizer.zero_grad()
        loss = model(step)
        if step == 2 and rank == 0:
            loss = loss + model.values[0][5] * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(weights(model)[0], before[0])
        assert moved == (step != 2)
        assert same_on_all_ranks(weights(model), f"weights.{step}")
    assert scaler.get_scale() == 2.0
    assert all(parameter.isfinite().all() for parameter in model.parameters())
