"""The gradients of one step, as Horovod's optimizer hands them over, and what Horovod gets in their place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod.gradients import OptimizerGradients


class Context(NamedTuple):
    """What `decompress` needs for one tensor.

    Attributes:
        gradient: the original, which receives the mean.
        step: None for a tensor that is no gradient of an optimizer.
        slot: the gradient's place, if it travels compressed.
    """

    gradient: torch.Tensor
    step: Step | None = None
    slot: Slot | None = None


class StepGradients:
    """The gradients of one step.

    A gradient may come twice: its hook was interrupted, and Horovod does not know that it came. It then gets the same
    answer.

    Args:
        step: the step.
        source: of the gradients.

    Attributes:
        compressed: whether gradients that have a slot travel compressed.
    """

    def __init__(self, step: Step, source: OptimizerGradients) -> None:
        self._step, self._source = step, source
        self._given: dict[str, Context] = {}  # by parameter's name, what `decompress` will need
        self._wires: dict[str, torch.Tensor] = {}  # what Horovod is to reduce, by parameter's name
        self.compressed = step.bits != UNCOMPRESSED

    def add(self, gradient: torch.Tensor, parameter: torch.Tensor, slot: Slot) -> Context:
        """Take a gradient that travels compressed; return what `decompress` will need.

        Args:
            slot: its place.
        """
        context = self._given.get(slot.name)
        if context is None:
            self._step.add(slot, gradient)
            context = self._given[slot.name] = Context(gradient, self._step, slot)
        return context

    def take_for_horovod(self, gradient: torch.Tensor, name: str) -> tuple[torch.Tensor, Context]:
        """Take a gradient that travels uncompressed; return what Horovod is to reduce, and what `decompress` will need.

        Args:
            name: of the parameter.
        """
        if name not in self._wires:
            self._wires[name] = self._step.uncompressed(gradient)
            self._given[name] = Context(gradient, self._step)
        return self._wires[name], self._given[name]
