"""The optimizer that a quantizer works for, and the parameter of each gradient."""

from __future__ import annotations

import weakref
from types import FrameType
from typing import Any

import torch

from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.transport.base import Transport


class OptimizerGradients(Source):
    """What a quantizer knows about its optimizer.

    Attributes:
        transport: connects the ranks over which the optimizer reduces.
        rank, world_size: in that group, when this object was made.
        factor: multiplies the sum over ranks.
        label: of the optimizer, in the names of collectives.
        named: (name, parameter) of every parameter that Horovod reduces, in the optimizer's order.
        grouped: whether Horovod reduces some gradients in one call, which refuses tensors of several devices.
        kind, as_in_memory, own_memory, sums_tickets: see `Source`.

    Raises:
        ValueError: the optimizer's reduction is not a sum or a mean; a parameter is not in `names`, or is on a device
            from which the transport cannot send.
    """

    def __init__(self, optimizer: Any, names: dict[torch.Tensor, str] | None, transport: Transport) -> None:
        # Weakly: an optimizer that its owner has deleted must not live on, or its hooks would, too.
        self._optimizer = weakref.ref(optimizer)
        self.transport = transport.within(horovod_optimizer.process_set_of(optimizer))
        self.rank, self.world_size = self.transport.rank, self.transport.size
        self.factor = horovod_optimizer.factor_of(optimizer, self.world_size)
        self.label, self.kind = horovod_optimizer.label_of(optimizer), type(optimizer).__name__
        self._names = names = horovod_optimizer.names_of(optimizer) if names is None else names
        parameters = horovod_optimizer.reduced_parameters(optimizer)
        unnamed = [tuple(p.shape) for p in parameters if p not in names]
        if unnamed:
            raise ValueError(f"named_parameters must name every parameter of the optimizer; missing shapes: {unnamed}")
        for device in {p.device: None for p in parameters}:
            if obstacle := self.transport.obstacle(device):
                raise ValueError(f"parameters on {device} cannot be sent: {obstacle}")
        self.named = [(names[p], p) for p in parameters]
        self.own_memory = False  # autograd hands on what it has
        self.as_in_memory, self.sums_tickets = False, True  # gradients are made contiguous
        self.grouped = horovod_optimizer.grouped(optimizer)
        self._countdown, self._passes = horovod_optimizer.countdown_of(optimizer), 1
        self._index = {parameter: i for i, (_, parameter) in enumerate(self.named)}
        # The parameter whose gradient comes after each one's: backward goes through them from the last to the first.
        self._following = [i - 1 for i in range(len(self.named))]
        self._latest = 0

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer; None once it has been deleted."""
        return self._optimizer()

    @property
    def outdated(self) -> bool:
        """Whether rank or world size have changed, as they may when Horovod is initialized again."""
        return (self.rank, self.world_size) != (self.transport.rank, self.transport.size)

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        groups = () if self.optimizer is None else self.optimizer.param_groups
        return [
            (self._names.get(parameter, f"{i} of group {group}"), parameter)
            for group, each in enumerate(groups)
            for i, parameter in enumerate(each["params"])
            if parameter.requires_grad or parameter in self._index
        ]

    def any_fresh(self) -> bool:
        """Whether backward has made any gradient since the last exchange. Call it in every step, before `fresh`."""
        self._passes = horovod_optimizer.passes_of(self.optimizer)
        for _, parameter in reversed(self.named):  # noqa: SIM110  # backward makes the last ones first
            if self._countdown[parameter] != self._passes:
                return True
        return False

    def fresh(self, parameter: torch.Tensor) -> bool:
        """Whether backward has made a gradient for this parameter since the last exchange."""
        return self._countdown[parameter] != self._passes

    def named_like(self, parameter: torch.Tensor) -> tuple[str, torch.Tensor] | None:
        """Name and parameter; None if the parameter is not reduced."""
        index = self._index.get(parameter)
        return None if index is None else self.named[index]

    def parameter_of(self, gradient: torch.Tensor, caller: FrameType | None = None) -> tuple[str, torch.Tensor] | None:
        """Name and parameter whose `.grad` is this tensor; None if there is none.

        Gradients come in nearly the same order in every step, so the first guess is the one that followed last time.

        Args:
            gradient: the tensor.
            caller: frame of the caller, which may know the parameter.
        """
        index = self._following[self._latest]
        if self.named[index][1].grad is not gradient:
            found = self._search(gradient, caller)
            if found is None:
                return None
            index = self._following[self._latest] = found
        self._latest = index
        return self.named[index]

    def _search(self, gradient: torch.Tensor, caller: FrameType | None) -> int | None:
        parameter = None if caller is None else horovod_optimizer.parameter_in(caller)
        index = None if parameter is None else self._index.get(parameter)
        if index is not None and self.named[index][1].grad is gradient:
            return index
        return next((i for i, (_, parameter) in enumerate(self.named) if parameter.grad is gradient), None)
