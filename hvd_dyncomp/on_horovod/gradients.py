"""The optimizer that a quantizer works for, and the parameter of each gradient."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.transport.base import Transport


class OptimizerGradients(Source):
    """What a quantizer knows about its optimizer.

    Attributes:
        grouped: whether Horovod reduces some gradients in one call, which refuses tensors of several devices.

    Raises:
        ValueError: the optimizer's reduction is not a sum or a mean; a parameter is not in `names`, or is on a device
            from which the transport cannot send.
    """

    own_memory = False  # autograd hands on what it has

    def __init__(self, optimizer: Any, names: dict[torch.Tensor, str] | None, transport: Transport) -> None:
        # Weakly: an optimizer that its owner has deleted must not live on, or its hooks would, too.
        self._optimizer = weakref.ref(optimizer)
        super().__init__(transport.within(horovod_optimizer.process_set_of(optimizer)))
        self.factor = horovod_optimizer.factor_of(optimizer, self.world_size)
        self.label = horovod_optimizer.label_of(optimizer)
        self._names = names = horovod_optimizer.names_of(optimizer) if names is None else names
        parameters = horovod_optimizer.reduced_parameters(optimizer)
        unnamed = [tuple(p.shape) for p in parameters if p not in names]
        if unnamed:
            raise ValueError(f"named_parameters must name every parameter of the optimizer; missing shapes: {unnamed}")
        self.named = [(names[p], p) for p in parameters]
        self.grouped = horovod_optimizer.grouped(optimizer)
        self._reduced = set(parameters)

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
            if parameter.requires_grad or parameter in self._reduced
        ]

    def reduces(self, parameter: torch.Tensor) -> bool:
        """Whether Horovod reduces a parameter's gradient."""
        return parameter in self._reduced
