"""Finds out for whom a compressor works: which optimizer called it, and whose gradient it was handed.

Horovod calls `compress(tensor)` with no name. But it does so from a method of its optimizer, and the tensor is the
`.grad` of one of the optimizer's parameters. Both can be seen from here without patching anything.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch

from hvd_dyncomp.checks import shown
from hvd_dyncomp.transport.horovod import averaging_factor, rank_and_size


def calling_optimizer(compressor: object) -> tuple[torch.optim.Optimizer | None, torch.Tensor | None]:
    """The Horovod optimizer further up the stack whose compressor is `compressor`, and the parameter it is busy with.

    Walking the stack costs microseconds, so it is done only for the first tensor and for unknown ones.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer) and getattr(caller, "_compression", None) is compressor:
            parameter = frame.f_locals.get("p")
            return caller, parameter if isinstance(parameter, torch.Tensor) else None
        frame = frame.f_back
    return None, None


class Binding:
    """What there is to know about the optimizer that a compressor works for.

    Attributes:
        optimizer: the optimizer itself.
        process_set: Horovod process set the gradients are reduced over.
        rank, world_size: within the process set.
        factor: what the sum over ranks is multiplied by.
        named: (name, parameter) of every parameter that Horovod reduces, in the optimizer's order.

    Raises:
        ValueError: the optimizer's reduction is not a sum or a mean, or a parameter is not in `names`.
    """

    def __init__(self, optimizer: Any, names: dict[torch.Tensor, str] | None) -> None:
        self.optimizer = optimizer
        self.process_set = getattr(optimizer, "process_set", None)
        self.rank, self.world_size = rank_and_size(self.process_set)
        self.factor = averaging_factor(_reduction(optimizer), self.world_size)
        # _requires_update holds exactly the parameters that have a hook, but as a set; the groups have the order.
        reduced = optimizer._requires_update
        names = optimizer._parameter_names if names is None else names
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p in reduced]
        unnamed = [tuple(p.shape) for p in parameters if p not in names]
        if unnamed:
            raise ValueError(f"named_parameters must name every parameter of the optimizer; missing shapes: {unnamed}")
        self.named = [(names[p], p) for p in parameters]
        self._order = list(range(len(self.named)))
        self._cursor = 0

    @property
    def outdated(self) -> bool:
        """Whether rank or world size are others by now, as they may be after Horovod was initialized again."""
        return (self.rank, self.world_size) != rank_and_size(self.process_set)

    def name_of(self, parameter: torch.Tensor) -> str | None:
        return next((name for name, known in self.named if known is parameter), None)

    def name_of_gradient(self, gradient: torch.Tensor) -> str | None:
        """Name of the parameter whose `.grad` this is; None for a tensor that is no parameter's gradient.

        Gradients come in nearly the same order every step. The search starts where the last one ended, and a gradient
        that is found out of order is moved to its new place.
        """
        order, count = self._order, len(self._order)
        for distance in range(count):
            position = (self._cursor + distance) % count
            name, parameter = self.named[order[position]]
            if parameter.grad is gradient:
                index = order.pop(position)
                target = self._cursor - (position < self._cursor)
                order.insert(target, index)
                self._cursor = (target + 1) % count
                return name
        return None


def _reduction(optimizer: torch.optim.Optimizer) -> Any:
    # Horovod's Adasum optimizer is a class of its own, without the attribute.
    return getattr(optimizer, "op", "Adasum")


def names_by_parameter(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[torch.Tensor, str]:
    """Turns the `named_parameters` argument round.

    Raises:
        ValueError: it is not made of pairs, or of none, or a name occurs twice.
    """
    try:
        pairs = [(name, parameter) for name, parameter in named_parameters]
    except (TypeError, ValueError) as error:
        raise ValueError(f"named_parameters must be (name, parameter) pairs, got {shown(named_parameters)}") from error
    for name, parameter in pairs:
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            pair, all_of_it = shown((name, parameter)), shown(named_parameters)
            raise ValueError(f"named_parameters must be (name, parameter) pairs, got {pair} in {all_of_it}")
    if not pairs:
        raise ValueError(
            f"named_parameters must name parameters, got {shown(named_parameters)}, which is empty "
            "(a generator can be read only once)"
        )
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"named_parameters must have unique names, got {twice} more than once")
    return {parameter: name for name, parameter in pairs}
