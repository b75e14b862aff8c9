"""Who hands over gradients: what a plan and its steps ask, whoever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hvd_dyncomp.transport.base import Transport


class Source(ABC):
    """Of the gradients of one model. `binding.Binding` is Horovod's optimizer.

    Attributes:
        transport: among the ranks over which it reduces.
        rank, world_size: there, when this was made.
        factor: what the sum over ranks is multiplied by.
        kind: in log lines.
        label: in the names of collectives; the same on all ranks.
        named: (name, parameter) of every parameter that is reduced, in the same order on all ranks.
        leaves_tickets: whether it reduces something itself in the place of a gradient that travels compressed, and
        tickets_on_device: whether that has to be where the gradients are.
        without_momentum: whether its optimizer steps without its momentum.
    """

    transport: Transport
    rank: int
    world_size: int
    factor: float
    kind: str
    label: str
    named: list[tuple[str, torch.Tensor]]
    leaves_tickets: bool
    tickets_on_device: bool
    without_momentum: bool

    @abstractmethod
    def fresh(self, parameter: torch.Tensor) -> bool:
        """Whether backward has made a gradient for this parameter since the last exchange."""
