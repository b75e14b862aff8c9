"""Compressed models do what plain DistributedDataParallel does, on the same device and over the same backend.

tools/on_gpu.sh runs this over NCCL, with two ranks on one GPU; elsewhere Gloo takes NCCL's place (as_nccl.py).
"""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
import torch.distributed as dist
from problem import same_on_all_ranks
from process_group import DEVICE
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import Averager, Schedule, ddp
from hvd_dyncomp.exchange.step import Step

WIDTH = 192
ROWS = 32
# Errors relative to the norm: of a step's means (below one bit what has waited comes, too); of the mean of 40 steps.
ONE_STEP = {32: 1e-6, 16: 1e-3, 8: 0.02, 4: 0.25, 0.25: 3.0}
FORTY_STEPS = {32: 1e-6, 4: 0.01, 0.25: 0.35}


class Net(nn.Module):
    """Layers of a size, the first of which is used on request only; a bucket of the model holds about one."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.side = nn.Linear(WIDTH, WIDTH)
            self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor, side: bool = True) -> Tensor:
        if side:
            x = x + self.side(x)
        for layer in self.layers:
            x = layer(torch.tanh(x))
        return x


class SumInBackward(torch.autograd.Function):
    """A collective of the program's own group in the middle of backward, as SyncBatchNorm has them."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.clone()
        dist.all_reduce(total)
        return total / dist.get_world_size()


def batch(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Another one on each rank."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(ROWS, WIDTH, generator=generator).to(DEVICE, dtype)


def wrapped(module: nn.Module, **arguments) -> DistributedDataParallel:
    return DistributedDataParallel(module.to(DEVICE), bucket_cap_mb=0.1, **arguments)


def pair(controller, module: nn.Module | None = None, **arguments):
    """A plain model, its compressed twin, and that one's quantizer."""
    module = module or Net()
    plain, ours = wrapped(copy.deepcopy(module), **arguments), wrapped(module, **arguments)
    return plain, ours, ddp.compress(ours, controller)


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.detach().clone() for p in model.parameters() if p.grad is not None]


def error(ours: list[Tensor], plain: list[Tensor]) -> float:
    """Of all values, relative to their norm."""
    mine, theirs = (torch.cat([each.double().flatten() for each in every]) for every in (ours, plain))
    return float((mine - theirs).norm() / theirs.norm())


def compare(plain: nn.Module, ours: nn.Module, bits: float) -> None:
    assert [p.grad is None for p in ours.parameters()] == [p.grad is None for p in plain.parameters()]
    assert error(gradients(ours), gradients(plain)) <= ONE_STEP[bits]
    assert same_on_all_ranks(gradients(ours))


def passed(model: nn.Module, seed: int, **arguments) -> None:
    model.zero_grad()
    model(batch(seed), **arguments).square().mean().backward()


@pytest.mark.parametrize("bits", [32, 4, 0.25])
def test_means(bits):
    """Of a step, to the level's error; and of many steps, less what residuals still hold."""
    plain, ours, _ = pair(bits)
    total = []
    for _ in range(40):
        for model in (plain, ours):
            passed(model, 0)
        compare(plain, ours, bits)
        total = [one + other for one, other in zip(total, gradients(ours), strict=True)] if total else gradients(ours)
    assert error([each / 40 for each in total], gradients(plain)) <= FORTY_STEPS[bits]


class Run:
    """A training whose level changes twice."""

    def __init__(self) -> None:
        self.model = wrapped(Net())
        self.quantizer = ddp.compress(self.model, Schedule({0: 32, 1: 4, 2: 0.25}))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def train(self, epochs: range) -> None:
        for epoch in epochs:
            for seed in range(4):
                passed(self.model, 4 * epoch + seed)
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
            self.quantizer.controller.step({"val_accuracy": epoch / 10})

    def parts(self) -> dict:
        controller = self.quantizer.controller
        return {"c": controller, "m": self.model, "o": self.optimizer, "q": self.quantizer}


def test_resume_is_bit_for_bit():
    """Across changes of the level, from a file; and replicas stay equal."""
    whole, again, file = Run(), Run(), io.BytesIO()
    whole.train(range(2))
    torch.save({name: part.state_dict() for name, part in whole.parts().items()}, file)
    whole.train(range(2, 4))
    file.seek(0)
    state = torch.load(file, map_location=DEVICE, weights_only=True)
    for name, part in again.parts().items():
        part.load_state_dict(state[name])
    again.train(range(2, 4))
    assert again.quantizer.bits == 0.25
    assert all(map(torch.equal, whole.model.parameters(), again.model.parameters()))
    assert same_on_all_ranks(list(again.model.parameters()))


@pytest.mark.parametrize("views", [False, True])
def test_find_unused_parameters(views, rank):
    """Ranks go other ways; in some steps no rank uses a layer."""
    plain, ours, _ = pair(16, find_unused_parameters=True, gradient_as_bucket_view=views)
    for seed in range(4):
        for model in (plain, ours):
            passed(model, seed, side=seed % 2 == 0 and rank == 0)
        compare(plain, ours, 16)


def test_no_sync():
    plain, ours, quantizer = pair(16)
    for step in range(3):
        for model in (plain, ours):
            model.zero_grad()
            for part in range(3):
                with model.no_sync() if part < 2 else contextlib.nullcontext():
                    model(batch(3 * step + part)).square().mean().backward()
        compare(plain, ours, 16)
    assert quantizer.meter.total().steps == 3


@pytest.mark.parametrize("bits", [32, 4])
def test_a_bfloat16_model(bits):
    plain, ours, _ = pair(bits, Net().bfloat16())
    for seed in range(3):
        for model in (plain, ours):
            model.zero_grad()
            model(batch(seed, torch.bfloat16)).float().square().mean().backward()
        assert {each.dtype for each in gradients(ours)} == {torch.bfloat16}
        assert error(gradients(ours), gradients(plain)) <= max(ONE_STEP[bits], 2.0**-7)
        assert same_on_all_ranks(gradients(ours))


@pytest.mark.parametrize("bits", [32, 4])
def test_autocast_and_a_gradient_scaler(bits, rank):
    """An overflow on one rank skips the step on all."""
    model = wrapped(Net())
    ddp.compress(model, bits)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    for seed in range(6):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.float16 if DEVICE == "cuda" else torch.bfloat16):
            loss = model(batch(seed)).float().square().mean()
        overflows = seed == 3
        scaler.scale(loss * (float("inf") if overflows and rank == 0 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert all(map(torch.equal, before, model.parameters())) == overflows
        assert same_on_all_ranks([*model.parameters(), torch.tensor(scaler.get_scale(), device=DEVICE)])
    assert scaler.get_scale() == 128.0


def test_two_models_in_one_backward():
    twins = [pair(bits, Net(3)) for bits in (8, 16)]
    for seed in range(3):
        for models in zip(*[each[:2] for each in twins], strict=True):
            for model in models:
                model.zero_grad()
            sum(model(batch(seed)).square().mean() for model in models).backward()
        for (plain, ours, _), bits in zip(twins, (8, 16), strict=True):
            compare(plain, ours, bits)


def test_collectives_of_the_program_within_backward():
    """In a communicator that is not the quantizer's, between its hooks."""

    class Between(Net):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = SumInBackward.apply(layer(torch.tanh(x)))
            return x + self.side(x)

    plain, ours, _ = pair(16, Between())
    for seed in range(3):
        for model in (plain, ours):
            passed(model, seed)
        compare(plain, ours, 16)


@pytest.mark.parametrize("bits", [32, 4])
def test_averager(bits, rank, size):
    """Small and skipped tensors travel beside the buckets; one has no gradient in every second step."""
    module = Net().to(DEVICE)
    averager = Averager(module.named_parameters(), bits, skip=lambda name, parameter: name == "layers.0.weight")
    for seed in range(4):
        generator = torch.Generator().manual_seed(100 * seed + rank)
        tensors = [torch.randn(p.shape, generator=generator).to(DEVICE) for p in module.parameters()]
        given: list[Tensor | None] = [*tensors]
        if seed % 2:
            given[2] = None
        expected = [each.clone() for each in tensors]
        for each in expected:
            dist.all_reduce(each)
            each /= size
        averager.mean_(given)
        there = [number for number, each in enumerate(given) if each is not None]
        assert error([tensors[i] for i in there], [expected[i] for i in there]) <= ONE_STEP[bits]
        assert same_on_all_ranks([tensors[i] for i in there])


def test_an_exception_is_final(monkeypatch):
    """On all ranks here: with an exception on one, its launcher ends the others."""
    model = wrapped(Net())
    ddp.compress(model, 4)
    passed(model, 0)
    add, calls = Step.add, []

    def failing(*arguments):
        calls.append(arguments)
        return 1 / 0 if len(calls) == 3 else add(*arguments)

    monkeypatch.setattr(Step, "add", failing)
    with pytest.raises(ZeroDivisionError):
        passed(model, 1)
    with pytest.raises(RuntimeError, match="was interrupted by"):
        passed(model, 2)
