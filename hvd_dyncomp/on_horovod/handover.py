"""What Horovod reduces in one step in place of gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.uncompressed import wire_form
from hvd_dyncomp.exchange.unused import has_values
from hvd_dyncomp.kernels import portable
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod.gradients import OptimizerGradients
from hvd_dyncomp.on_horovod.tickets import Tickets
from hvd_dyncomp.transport.base import Transport


class Context(NamedTuple):
    """What `decompress` needs for one tensor.

    Attributes:
        gradient: the original, which receives the mean.
        step: None for a tensor that is no gradient of an optimizer.
        slot: the gradient's place, if it travels compressed, and Horovod reduces a ticket.
    """

    gradient: torch.Tensor
    step: Step | FailedStep | None = None
    slot: Slot | None = None


class Handover:
    """The gradients of one step, as Horovod hands them over.

    Attributes:
        given: by parameter's name, what Horovod got. A gradient may come twice: its hook was interrupted, and Horovod
            does not know that it came. It then gets the same answer.
        in_use: whether any compressed parameter has a gradient on this rank.
    """

    def __init__(self, step: Step, source: OptimizerGradients, tickets: Tickets) -> None:
        self._step, self._source, self._tickets = step, source, tickets
        self._versions: list[tuple[torch.Tensor, int]] = []  # each gradient's version when it arrived
        self.given: dict[str, tuple[torch.Tensor, Context]] = {}
        self.in_use = False

    @property
    def overwritten(self) -> bool:
        """Whether the program has written to a compressed gradient since it arrived."""
        for gradient, version in self._versions:  # noqa: SIM110  # a generator would be a call for each
            if gradient._version != version:
                return True
        return False

    def take(
        self, gradient: torch.Tensor, name: str, parameter: torch.Tensor, slot: Slot | None
    ) -> tuple[torch.Tensor, Context]:
        """Take a gradient; return what Horovod is to reduce, and what `decompress` will need.

        Args:
            slot: its place; None if it is skipped.
        """
        if name not in self.given:
            if slot is None or self._step.bits == UNCOMPRESSED:
                self.given[name] = self._step.uncompressed(name, gradient), Context(gradient, self._step)
            else:
                # A ticket of zero on all ranks means that no rank has used the parameter.
                used = self._source.fresh(parameter) or has_values(gradient)
                self.in_use = self.in_use or used
                self._note_version(gradient)
                self._step.add(slot, gradient, used)
                ticket = self._tickets.fill(name, used, gradient.device)
                self.given[name] = ticket, Context(gradient, self._step, slot)
        return self.given[name]

    def _note_version(self, gradient: torch.Tensor) -> None:
        """Note the gradient's version, if only the program writes to it with torch operators.

        Kernels write a mean by its address, which does not count; a copy counts. Views of one tensor share a version.
        """
        kernel = kernels.backends.get("cpu" if gradient.is_cpu else gradient.device.type, portable)
        if kernel is portable or gradient.dtype is not torch.float32 or not gradient.is_contiguous():
            return
        if not gradient._is_view():
            self._versions.append((gradient, gradient._version))


def wire_after_failure(gradient: torch.Tensor, bits: float, transport: Transport) -> torch.Tensor:
    """A tensor of the other ranks' shape for Horovod, so that they get far enough to hear of this rank's error."""
    # Except for tensors that they skip: perhaps `skip` itself has failed here.
    compressed = bits != UNCOMPRESSED and gradient.is_floating_point() and bool(gradient.numel())
    return torch.zeros(1, dtype=torch.float32, device="cpu") if compressed else wire_form(gradient, transport)
