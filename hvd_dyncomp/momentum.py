"""At few bits what waits in residuals is a momentum already; an optimizer may step without its own (docs/study.md).

Its groups are others only while it steps: schedules, checkpoints and whoever looks at them see the user's values.
"""

from __future__ import annotations

import inspect
import logging
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch

from hvd_dyncomp.horovod_optimizer import stepping_class

logger = logging.getLogger(__name__)

#: A level of at most so many bits has enough of a momentum by itself (docs/study.md).
MOST_BITS = 2
MUCH_MOMENTUM = 0.5


class Momentum:
    """The momentum of one optimizer, and its steps without.

    SGD that has momentum m and dampening d steps by (1 - d) / (1 - m) times its learning rate instead, so that a
    gradient adds up to the same, but at once. Of Adam and AdamW the first beta is 0. The momentum that SGD keeps in its
    state is zero then, so that no gradient counts twice when more bits arrive.

    Args:
        optimizer: Horovod's. Others than those three are left as they are.
        waiting: the parameters whose gradients wait in residuals. The others, small ones and those that are skipped,
            keep their momentum.
        rank: of this process; the first one logs.
        replace: whether there are to be such steps; otherwise it is only said where they would help.

    Attributes:
        left_out: whether the next steps are to be without.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, waiting: Iterable[torch.Tensor], rank: int, *, replace: bool
    ) -> None:
        self._optimizer, self._waiting, self._rank = weakref.ref(optimizer), set(waiting), rank
        way = _WAYS.get(inspect.unwrap(stepping_class(optimizer).step))
        self._replace, self._known, self._without = replace, way is not None, way if replace else None
        self._changed: list[tuple[dict[str, Any], str, Any, Any]] = []  # group, key, the user's value, ours
        self._beside: list[dict[str, Any]] = []  # groups of those that keep theirs
        self._said = self.left_out = False
        # Weakly: the optimizer outlives a quantizer that nobody wants any more. Horovod's step has the optimizer's own
        # within it. That one is what counts, and comes last: each begins with the user's values.
        this = weakref.ref(self)
        self._hooks = [
            optimizer.register_step_pre_hook(lambda *_: _of(this, Momentum._begin_step)),
            optimizer.register_step_post_hook(lambda *_: _of(this, Momentum._end_step)),
            # A step that was interrupted may be followed by a checkpoint.
            optimizer.register_state_dict_pre_hook(lambda *_: _of(this, Momentum.put_back)),
        ]

    def choose(self, bits: float) -> None:
        """Whether it is left out of the steps to come is a matter of the level of the gradients that have come."""
        self.left_out = bits <= MOST_BITS and self._without is not None
        optimizer = self._optimizer()
        if self._said or self._rank or optimizer is None:
            return
        kind = stepping_class(optimizer).__name__
        if self.left_out and momentum_of(optimizer):
            self._said = True
            logger.info(
                "at %g bits and less %s steps without its momentum of %g", MOST_BITS, kind, momentum_of(optimizer)
            )
        elif bits < 1 or (self._replace and bits <= MOST_BITS):
            self._warn(kind, momentum_of(optimizer))

    def _warn(self, kind: str, momentum: float) -> None:
        if self._without is None and momentum >= MUCH_MOMENTUM:
            self._said = True
            logger.warning(
                "%s has a momentum of %g, and at few bits what waits in residuals acts as another, which may harm "
                "training: %s (docs/quickstart.md)",
                kind,
                momentum,
                "DynamicQuantizer(replace_momentum=True) has it step without" if self._known else "try it without",
            )

    def put_back(self) -> None:
        """Gives the optimizer's groups the user's values again, where nobody has set others since."""
        for group, key, users, ours in self._changed:
            if group.get(key) is ours:
                group[key] = users
        optimizer = self._optimizer()
        if optimizer is not None and self._beside:
            groups = optimizer.param_groups
            groups[:] = [group for group in groups if not any(group is beside for beside in self._beside)]
        self._changed.clear()
        self._beside.clear()

    def remove(self) -> None:
        """Touches the optimizer no more."""
        self.put_back()
        for hook in self._hooks:
            hook.remove()

    def _begin_step(self) -> None:
        self.put_back()
        optimizer = self._optimizer()
        if self.left_out and self._without is not None and optimizer is not None:
            for group in list(optimizer.param_groups):
                self._divide(optimizer, group, self._without(group))

    def _end_step(self) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            # Not before the step: only when it is over it is certain that it was one without.
            for group in [group for group, key, *_ in self._changed if key == "momentum"]:
                _forget(optimizer, group)
        self.put_back()

    def _divide(self, optimizer: torch.optim.Optimizer, group: dict[str, Any], ours: dict[str, Any]) -> None:
        """Gives a group our values; those of its parameters that keep the user's go into one beside it."""
        waiting = [parameter for parameter in group["params"] if parameter in self._waiting]
        if not waiting or not ours:
            return
        if len(waiting) < len(group["params"]):
            others = [parameter for parameter in group["params"] if parameter not in self._waiting]
            self._beside.append({**group, "params": others})
            optimizer.param_groups.append(self._beside[-1])
            ours["params"] = waiting
        for key, value in ours.items():
            self._changed.append((group, key, group[key], value))
            group[key] = value


def _sgd(group: dict[str, Any]) -> dict[str, Any]:
    momentum = group["momentum"]
    if not 0 < momentum < 1:
        return {}
    return {"lr": group["lr"] * ((1 - group["dampening"]) / (1 - momentum)), "momentum": 0.0}


def _adam(group: dict[str, Any]) -> dict[str, Any]:
    first, second = group["betas"]
    return {"betas": (first * 0, second)}  # a tensor, if it was one


# What a group of an optimizer without momentum has in place of its own values. By the method that steps: a class that
# has one of its own may mean something else by its groups.
_WAYS: dict[Callable, Callable[[dict[str, Any]], dict[str, Any]]] = {
    inspect.unwrap(torch.optim.SGD.step): _sgd,
    inspect.unwrap(torch.optim.Adam.step): _adam,
    inspect.unwrap(torch.optim.AdamW.step): _adam,
}


def _forget(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> None:
    """Empties SGD's buffers. The state keeps its form: who joins an elastic job has to find what he has himself."""
    buffers = []
    for parameter in filter(lambda p: p.requires_grad, group["params"]):
        state = optimizer.state[parameter]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        buffers.append(state["momentum_buffer"])
    if buffers:
        torch._foreach_zero_(buffers)


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """How much of a step it carries on into the next: SGD's momentum, or Adam's first beta; the most of its groups."""
    groups = optimizer.param_groups
    return max((float(group.get("momentum") or (group.get("betas") or (0.0,))[0]) for group in groups), default=0.0)


def _of(this: weakref.ref[Momentum], action: Callable[[Momentum], None]) -> None:
    momentum = this()
    if momentum is not None:
        action(momentum)
