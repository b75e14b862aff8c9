"""The gradients of one step, as Horovod's optimizer hands them over, and what Horovod gets in their place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod import horovod_optimizer
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

    Args:
        step: the step.
        source: of the gradients.
        on_device: whether Horovod must get tickets on gradients' devices, because it may reduce them in one call with
            gradients. Otherwise they are in main memory, so that Horovod waits for no GPU.

    Attributes:
        given: by parameter's name, what `decompress` will need. A gradient may come twice: its hook was interrupted,
            and Horovod does not know that it came. It then gets the same answer.
        in_use: whether any compressed parameter has a gradient on this rank.
    """

    def __init__(self, step: Step, source: OptimizerGradients, *, on_device: bool) -> None:
        self._step, self._source, self._on_device = step, source, on_device
        self._wires: dict[str, torch.Tensor] = {}  # what Horovod is to reduce, by parameter's name
        self.given: dict[str, Context] = {}
        self.in_use = False

    def add_gradient(self, gradient: torch.Tensor, name: str, parameter: torch.Tensor, slot: Slot) -> Context:
        """Take a gradient that travels compressed; return what `decompress` will need.

        Args:
            slot: its place.
        """
        context = self.given.get(name)
        if context is None:
            own = horovod_optimizer.from_backward(self._source.optimizer, parameter)
            self.in_use = self.in_use or own or bool(gradient.any())
            self._step.add(slot, gradient)
            context = self.given[name] = Context(gradient, self._step, slot)
        return context

    def take_for_horovod(
        self, gradient: torch.Tensor, name: str, parameter: torch.Tensor, slot: Slot | None
    ) -> tuple[torch.Tensor, Context]:
        """Take a gradient; return what Horovod is to reduce, and what `decompress` will need.

        Args:
            slot: its place; None if it is skipped.
        """
        if name not in self._wires:
            if slot is None or self._step.bits == UNCOMPRESSED:
                wire = self._step.uncompressed(gradient)
                self.given[name] = Context(gradient, self._step)
            else:
                self.add_gradient(gradient, name, parameter, slot)
                # Counted by nobody, as what Horovod sends to negotiate: a resumed run's meter is the whole one's.
                wire = torch.ones(1, dtype=torch.float32, device=gradient.device if self._on_device else "cpu")
            self._wires[name] = wire
        return self._wires[name], self.given[name]
