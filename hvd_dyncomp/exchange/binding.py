"""The optimizer for which a quantizer works, and whose gradient a tensor is."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from hvd_dyncomp import horovod_optimizer
from hvd_dyncomp.checks import shown
from hvd_dyncomp.transport.base import Transport


class Binding:
    """What there is to know about the optimizer that a quantizer works for.

    Attributes:
        transport: among the ranks over which it reduces.
        rank, world_size: there, when this was made.
        factor: what the sum over ranks is multiplied by.
        label: of the optimizer, in the names of collectives.
        named: (name, parameter) of every parameter that Horovod reduces, in the optimizer's order.

    Raises:
        ValueError: the optimizer's reduction is not a sum or a mean, or a parameter is not in `names`, or on a device
            from which the transport cannot send.
    """

    def __init__(self, optimizer: Any, names: dict[torch.Tensor, str] | None, transport: Transport) -> None:
        # Weakly: an optimizer that its owner has thrown away must not live on, as its hooks would as well.
        self._optimizer = weakref.ref(optimizer)
        self.transport = transport.within(horovod_optimizer.process_set_of(optimizer))
        self.rank, self.world_size = self.transport.rank, self.transport.size
        self.factor = horovod_optimizer.factor_of(optimizer, self.world_size)
        self.label = horovod_optimizer.label_of(optimizer)
        names = horovod_optimizer.names_of(optimizer) if names is None else names
        parameters = horovod_optimizer.reduced_parameters(optimizer)
        unnamed = [tuple(p.shape) for p in parameters if p not in names]
        if unnamed:
            raise ValueError(f"named_parameters must name every parameter of the optimizer; missing shapes: {unnamed}")
        for device in {p.device: None for p in parameters}:
            if obstacle := self.transport.obstacle(device):
                raise ValueError(f"parameters on {device} cannot be sent: {obstacle}")
        self.named = [(names[p], p) for p in parameters]
        self._countdown, self._passes = horovod_optimizer.countdown_of(optimizer), 1
        self._order = list(range(len(self.named)))
        self._cursor = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """None if there it is no more."""
        return self._optimizer()

    @property
    def outdated(self) -> bool:
        """Whether rank or world size are others by now, as they may be after Horovod was initialized again."""
        return (self.rank, self.world_size) != (self.transport.rank, self.transport.size)

    def begin_step(self) -> bool:
        """Whether backward has made any gradient since the last exchange. For every step, before `fresh`."""
        self._passes = horovod_optimizer.passes_of(self.optimizer)
        return any(self.fresh(parameter) for _, parameter in self.named)

    def fresh(self, parameter: torch.Tensor) -> bool:
        """Whether backward has made a gradient for this parameter since the last exchange."""
        return self._countdown[parameter] != self._passes

    def named_like(self, parameter: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Name and parameter; None if it is not reduced."""
        return next((pair for pair in self.named if pair[1] is parameter), None)

    def whose(self, gradient: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Name and parameter whose `.grad` this is; None for a tensor that is no parameter's gradient.

        Gradients come in nearly the same order every step. The search starts where the last one ended, and a gradient
        that is found out of order is moved to its new place.
        """
        order, count = self._order, len(self._order)
        for distance in range(count):
            position = (self._cursor + distance) % count
            found = self.named[order[position]]
            if found[1].grad is gradient:
                index = order.pop(position)
                target = self._cursor - (position < self._cursor)
                order.insert(target, index)
                self._cursor = (target + 1) % count
                return found
        return None


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
