"""Models, optimizers and steps that `torch.compile` has compiled train as those that it has not."""

from collections.abc import Callable
from pathlib import Path

import horovod.torch as hvd
import pytest
import torch
from problem import attached, same_on_all_ranks
from torch import nn

from hvd_dyncomp import Controller, DynamicQuantizer, Static, less_momentum

WIDTHS = (40, 48, 56, 64)  # of no two layers the same: Horovod's hooks, compiled, take a gradient for one of its shape
STEPS = 6
QUICK = {"backend": "aot_eager"}  # all of the compiler but the last part, which makes code


class Block(nn.Module):
    """A layer. Of a class of our own: what the compiler is handed a `Sequential` to compile it leaves as it is."""

    def __init__(self, inputs: int, outputs: int, breaks: bool) -> None:
        super().__init__()
        self.linear, self.breaks = nn.Linear(inputs, outputs), breaks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return torch.tanh(self.linear(x))


class Net(nn.Module):
    """Three layers, before each of which, if asked for, is something that no compiler can look into."""

    def __init__(self, *, breaks: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(*pair, breaks) for pair in zip(WIDTHS, WIDTHS[1:], strict=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        x = self.blocks[1](x)
        return self.blocks[2](x)


def whole(net: Net) -> nn.Module:
    return torch.compile(net, **QUICK)


def in_place(net: Net) -> nn.Module:
    net.compile(**QUICK)
    return net


def by_block(net: Net) -> nn.Module:
    for block in net.blocks:
        block.compile(**QUICK)
    return net


def to_machine_code(net: Net) -> nn.Module:
    return torch.compile(net, backend="inductor")


def as_it_is(net: Net) -> nn.Module:
    return net


class Run:
    """A training. Its results are the weights and, with a quantizer, all that it has sent and still owes."""

    def __init__(
        self, compression: object, compiler: Callable[[Net], nn.Module] = as_it_is, *, late=False, breaks=False
    ) -> None:
        torch._dynamo.reset()
        torch._dynamo.utils.clear_compilation_metrics()
        torch.manual_seed(3)
        self.net, self.compression = Net(breaks=breaks), compression
        self.model = self.net if late else compiler(self.net)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=0.9)
        self.optimizer = hvd.DistributedOptimizer(
            less_momentum(optimizer) if isinstance(compression, DynamicQuantizer) else optimizer,
            named_parameters=self.model.named_parameters(),
            compression=compression,
        )
        attached(self.optimizer)
        if late:
            self.model = compiler(self.net)
        self._data = torch.Generator().manual_seed(hvd.rank())
        self.backward: Callable[[torch.Tensor], None] = self._backward
        self.step: Callable[[], object] = self.optimizer.step

    def _backward(self, x: torch.Tensor) -> None:
        self.model(x).square().mean().backward()

    def steps(self, count: int = STEPS) -> None:
        for _ in range(count):
            self.optimizer.zero_grad()
            self.backward(torch.randn(16, WIDTHS[0], generator=self._data))
            self.step()

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])


def quantizer(bits: float = 4) -> DynamicQuantizer:
    return DynamicQuantizer(Controller(Static(bits)), bucket_bytes=8000)


MAKERS = {"stock Horovod": lambda: hvd.Compression.none, "ours": quantizer, "without momentum": lambda: quantizer(0.25)}


@pytest.fixture(scope="module")
def eager() -> dict[str, Run]:
    """What is to come of it."""
    runs = {who: Run(make()) for who, make in MAKERS.items()}
    for run in runs.values():
        run.steps()
    return runs


def assert_same(run: Run, like: Run, **tolerance: float) -> None:
    torch.testing.assert_close(run.weights(), like.weights(), **(tolerance or {"rtol": 0, "atol": 0}))
    assert same_on_all_ranks([run.weights()], "weights")
    if isinstance(run.compression, DynamicQuantizer):
        sent, expected = run.compression.meter.total(), like.compression.meter.total()
        assert (sent.sent_bytes, sent.steps) == (expected.sent_bytes, expected.steps)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("compiler", [whole, in_place, by_block])
def test_a_compiled_model_does_the_same(compiler, late, eager):
    run = Run(quantizer(), compiler, late=late)
    run.steps()
    assert_same(run, eager["ours"])


@pytest.mark.parametrize("who", MAKERS)
def test_machine_code_does_the_same_but_for_rounding(who, eager):
    run = Run(MAKERS[who](), to_machine_code)
    run.steps()
    assert_same(run, eager[who], rtol=1e-3, atol=1e-4)


def looked_into() -> set[str]:
    """The functions of the library that the compiler has looked into since `Run` was made."""
    metrics = torch._dynamo.utils.get_compilation_metrics()
    return {one.co_name for one in metrics if "hvd_dyncomp" in Path(one.co_filename or "").parts}


@pytest.mark.parametrize("who", MAKERS)
def test_a_compiled_step_of_the_optimizer_does_the_same(who, eager):
    run = Run(MAKERS[who]())
    run.step = torch.compile(lambda: run.optimizer.step(), **QUICK)
    run.steps()
    assert_same(run, eager[who])
    assert not looked_into()


@pytest.mark.parametrize("who", MAKERS)
def test_backward_within_a_compiled_function_does_the_same(who, eager):
    """Then the compiler looks into hooks as well, and takes what it sees of one gradient to be so of the next."""
    run = Run(MAKERS[who]())
    run.backward = torch.compile(run._backward, **QUICK)
    run.steps()
    assert_same(run, eager[who])
    assert all("compress" in name or "submit" in name for name in looked_into()), "by which Horovod calls"


def beginnings(run: Run) -> tuple[list[float], list[tuple[float, float]]]:
    """Of a step: when each bucket was encoded, and when the compiler's parts of backward ran."""
    run.steps(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run.steps(1)
    events = profile.events()
    encoded = [event.time_range.start for event in events if event.name == "hvd_dyncomp.encode"]
    parts = [event.time_range for event in events if event.name == "CompiledFunctionBackward"]
    return sorted(encoded), sorted((part.start, part.end) for part in parts)


@pytest.mark.parametrize("compiler", [whole, in_place])
def test_with_one_graph_gradients_come_when_backward_is_over(compiler):
    encoded, [(_, end)] = beginnings(Run(quantizer(), compiler))
    assert len(encoded) > 1 and encoded[0] >= end


@pytest.mark.parametrize(("compiler", "breaks"), [(by_block, False), (whole, True)])
def test_with_several_graphs_gradients_travel_while_backward_goes_on(compiler, breaks):
    encoded, parts = beginnings(Run(quantizer(), compiler, breaks=breaks))
    assert len(parts) == len(WIDTHS) - 1
    for (_, end), (start, _) in zip(parts, parts[1:], strict=False):
        assert any(end <= at < start for at in encoded), (encoded, parts)


def test_a_state_goes_from_a_model_to_the_same_one_compiled(eager):
    """By the original's names; those of what `torch.compile` returns have a prefix."""
    before, names = Run(quantizer()), [name for name, _ in Net().named_parameters()]
    before.steps(STEPS // 2)
    state = before.compression.state_dict()
    after = Run(quantizer(), whole, late=True)
    after.net.load_state_dict(before.net.state_dict())
    after.optimizer.load_state_dict(before.optimizer.state_dict())
    after._data = before._data
    after.compression.load_state_dict(state)
    after.steps(STEPS - STEPS // 2)
    assert_same(after, eager["ours"])
    assert sorted(after.compression.state_dict()["residuals"]) == sorted(names)
    prefixed = Run(quantizer(), whole)
    with pytest.raises(ValueError, match="state has residuals of other parameters: _orig_mod.blocks.0.linear.bias has"):
        prefixed.compression.load_state_dict(state)
