"""The source of gradients: what a plan and its steps need to know about it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hvd_dyncomp.transport.base import Transport


class Source(ABC):
    """The gradients of one model. `on_horovod.gradients` is that of a Horovod optimizer, `ddp.model` that of a model.

    Attributes:
        transport: connects the ranks over which it reduces.
        rank, world_size: in that group, when this object was made.
        factor: multiplies the sum over ranks.
        kind: name in log lines.
        label: in the names of collectives; the same on all ranks.
        named: (name, parameter) of every parameter that is reduced, in the same order on all ranks.
        leaves_tickets: whether it reduces a ticket itself in place of a compressed gradient.
        own_memory: whether no two gradients share memory, and nobody else uses it before a step is over.
        as_in_memory: whether gradients come with their values in the order in which the parameter's lie in memory, even
            if that is not the logical one (channels_last, transposed).
        sums_tickets: whether steps have to sum tickets, because it may have parameters that no rank uses.
        tickets_on_device: whether tickets must be on the gradients' device.
        without_momentum: whether its optimizer steps without momentum.
    """

    transport: Transport
    rank: int
    world_size: int
    factor: float
    kind: str
    label: str
    named: list[tuple[str, torch.Tensor]]
    own_memory: bool
    as_in_memory: bool
    leaves_tickets: bool
    sums_tickets: bool
    tickets_on_device: bool
    without_momentum: bool

    @abstractmethod
    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that training changes as things are now, whether it is reduced or not."""

    @abstractmethod
    def fresh(self, parameter: torch.Tensor) -> bool:
        """Whether backward has made a gradient for this parameter since the last exchange."""
