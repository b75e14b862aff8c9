"""The source of gradients: what a plan and its steps need to know about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

import torch

from hvd_dyncomp.transport.base import Transport


class Source(ABC):
    """The gradients of one model. `on_horovod.gradients` is that of a Horovod optimizer, `ddp.model` that of a model.

    Attributes:
        transport: connects the ranks over which it reduces.
        rank, world_size: in that group, when this object was made.
        factor: multiplies the sum over ranks.
        label: in the names of collectives; the same on all ranks.
        named: (name, parameter) of every parameter that is reduced, in the same order on all ranks.
        own_memory: whether no two gradients share memory, and nothing else uses it during a step.
        as_in_memory: whether gradients have the memory layout of their parameters (channels_last, transposed).
        parts: by parameter's name, the name of its part: the gradients of one part arrive together, and a bucket holds
            parameters of one part only. None if any gradients may share a bucket.
    """

    transport: Transport
    rank: int
    world_size: int
    factor: float
    label: str
    named: list[tuple[str, torch.Tensor]]
    own_memory: bool
    as_in_memory = False
    parts: Mapping[str, str] | None = None

    def __init__(self, transport: Transport) -> None:
        self.transport, self.rank, self.world_size = transport, transport.rank, transport.size
        self.factor = 1 / self.world_size

    @abstractmethod
    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that training changes as things are now, whether it is reduced or not."""

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that is reduced, now or once it is no longer frozen, as the optimizer has them."""
        return self.trained()
