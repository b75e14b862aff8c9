"""Training loops in which an optimizer steps without its momentum, and users do what they may do with any optimizer.

The oracle is an optimizer of which the user has made by hand what `less_momentum` makes within a step: large tensors
in a group of their own, without momentum, at 1 / (1 - momentum) of the rate. Both must be the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress

import horovod.torch as hvd
import pytest
import torch
from problem import DEVICE, attached, same_on_all_ranks
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule, Static, less_momentum

pytestmark = [
    pytest.mark.promise("With `less_momentum`, all ranks change the momentum in the same steps."),
    pytest.mark.timeout(60, method="thread"),
]

SIZES = {"large": 3000, "larger": 5000, "small": 10}
RATE, MOMENTUM = 0.125, 0.75  # a gradient adds up to four times the rate, exactly
STEPS = 6


class Training:
    """Parameters, an optimizer of Horovod's over them, and gradients of each rank's own."""

    def __init__(self, name: str, how: str = "ours", controller: Controller | None = None, **arguments) -> None:
        self.parameters = {key: torch.nn.Parameter(torch.zeros(size, device=DEVICE)) for key, size in SIZES.items()}
        *large, small = self.parameters.values()
        by_hand = [{"params": large, "lr": RATE / (1 - MOMENTUM), "momentum": 0.0}, {"params": [small]}]
        groups = by_hand if how == "by hand" else [*large, small]
        optimizer = torch.optim.SGD(groups, lr=RATE, momentum=MOMENTUM)
        self.quantizer = DynamicQuantizer(controller or Controller(Static(0.25)))
        self.optimizer = hvd.DistributedOptimizer(
            less_momentum(optimizer) if how == "ours" else optimizer,
            named_parameters=[(f"{name}.{how}.{key}", parameter) for key, parameter in self.parameters.items()],
            compression=hvd.Compression.none if how == "stock" else self.quantizer,
            **arguments,
        )
        attached(self.optimizer)

    def loss(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + hvd.rank())
        noise = [torch.randn(p.shape, generator=generator).to(DEVICE) for p in self.parameters.values()]
        return sum((p * n).sum() for p, n in zip(self.parameters.values(), noise, strict=True))

    def backward(self, step: int) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(step)
        loss.backward()
        return loss

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters.values()]


def steps(training: Training) -> Iterator[int]:
    """The numbers of the steps; in between, what the user has set is there."""
    for step in range(STEPS):
        yield step
        group = training.optimizer.param_groups[-1]
        assert (
            group["momentum"] == MOMENTUM and training.optimizer.state_dict()["param_groups"][-1]["lr"] == group["lr"]
        )


def plain(training: Training) -> None:
    for step in steps(training):
        training.backward(step)
        training.optimizer.step()


def scheduled_in_a_hook(training: Training) -> None:
    """By a hook that was there before the first gradient. Horovod's step has the user's within it: two calls each."""
    schedule = ExponentialLR(training.optimizer, 0.9)
    training.optimizer.register_step_post_hook(lambda *_: schedule.step())
    plain(training)
    assert training.optimizer.param_groups[-1]["lr"] == pytest.approx(RATE * 0.9 ** (2 * STEPS))


def closure_that_synchronizes(training: Training, bad: tuple[int, ...] = ()) -> None:
    """Horovod's documented form. Where a batch is bad, on all ranks, the closure raises, and the loop goes on."""
    calls = []

    def closure(step: int) -> Tensor:
        calls.append(training.backward(step))
        training.optimizer.synchronize()
        if step in bad:
            raise ValueError
        return calls[-1]

    for step in steps(training):
        with training.optimizer.skip_synchronize(), suppress(ValueError):
            assert training.optimizer.step(lambda step=step: closure(step)) is calls[-1]
        training.optimizer.load_state_dict(training.optimizer.state_dict())
    assert len(calls) == STEPS


def closure_that_raises(training: Training) -> None:
    closure_that_synchronizes(training, bad=(1, 4))


def clipped_and_reduced_twice(training: Training) -> None:
    for step in steps(training):
        training.backward(step)
        training.optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(training.parameters.values(), 1.0)
        training.optimizer.step()


LOOPS = [plain, scheduled_in_a_hook, closure_that_raises, clipped_and_reduced_twice]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_loop_does_what_it_does_with_groups_made_by_hand(loop: Callable[[Training], None], request):
    mine, by_hand = (Training(request.node.name, how) for how in ("ours", "by hand"))
    loop(mine)
    loop(by_hand)
    assert same_on_all_ranks(mine.values(), request.node.name)
    assert all(map(torch.equal, mine.values(), by_hand.values()))
    assert len(mine.optimizer.param_groups) == 1
    assert all(value.any() for value in mine.values())


def test_levels_that_cross_the_line_and_a_state_that_is_broadcast(request):
    """By rank 0, which has gone back to a state with momentum; that of the others is written to where it lies."""
    controller = Controller(Schedule({0: 4, 1: 0.25, 2: 4}))
    training = Training(request.node.name, controller=controller)
    hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)
    states = []
    for epoch in range(3):
        for step in range(2):
            training.backward(10 * epoch + step)
            training.optimizer.step()
            states.append(training.optimizer.state_dict() if step else None)
        state = training.optimizer.state[training.parameters["large"]]["momentum_buffer"]
        assert bool(state.any()) == (epoch != 1)
        if epoch == 0:
            kept = {key: value.clone() for key, value in enumerate(map(_buffer, training.optimizer.state.values()))}
        if epoch == 1:
            if hvd.rank() == 0:
                groups = training.optimizer.state_dict()["param_groups"]
                state = {key: {"momentum_buffer": value} for key, value in kept.items()}
                training.optimizer.load_state_dict({"state": state, "param_groups": groups})
            hvd.broadcast_optimizer_state(training.optimizer, root_rank=0)
            training.backward(20)
            training.optimizer.step()
            assert not training.optimizer.state[training.parameters["large"]]["momentum_buffer"].any()
        controller.step({})
    assert same_on_all_ranks(training.values(), request.node.name)
    assert same_on_all_ranks(list(map(_buffer, training.optimizer.state.values())), f"{request.node.name}.state")


def _buffer(state: dict) -> Tensor:
    return state["momentum_buffer"]
