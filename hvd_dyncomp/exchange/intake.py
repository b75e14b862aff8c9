"""The gradients of one step as they arrive, and what Horovod reduces for each."""

from __future__ import annotations

from typing import NamedTuple

import torch

from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.memory import overlapping
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.tally import Tally
from hvd_dyncomp.exchange.uncompressed import wire_form
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.kernels import portable


class Taken(NamedTuple):
    """A gradient that has arrived.

    Attributes:
        wire: what Horovod reduces.
        gradient: the original, which receives the mean.
        compressed: whether it travels by this package's collectives, and `wire` is a ticket.
    """

    wire: torch.Tensor
    gradient: torch.Tensor
    compressed: bool


class Intake:
    """The gradients of one step.

    Args:
        plan: the buckets of the step.
        tally: counts its bytes.
        fresh: whether backward has run since the last exchange.
        in_place: whether a gradient that is not compressed may be reduced where it is.

    Attributes:
        taken: by parameter's name. A gradient may come twice: its hook was interrupted, and Horovod does not know that
            it came. It then gets the same answer.
        in_use: whether any of the compressed parameters has a gradient on this rank.
        apart: after `set_apart`, by identity of a gradient whose mean cannot be written there: other memory.
        used: whether each has one, by name. On a GPU that nobody may wait for yet, a tensor of one bool.
    """

    def __init__(self, plan: Plan, tally: Tally, *, fresh: bool, in_place: bool) -> None:
        self._plan, self._tally, self._fresh, self._in_place = plan, tally, fresh, in_place
        self.taken: dict[str, Taken] = {}
        self.apart: dict[int, torch.Tensor] = {}
        self.in_use = False
        self.used: dict[str, bool | torch.Tensor] = {}
        self._slots: dict[int, Slot] = {}  # by identity of a compressed gradient, once somebody asks
        self._versions: list[tuple[torch.Tensor, int]] = []  # each gradient's version when it arrived

    @property
    def changed(self) -> bool:
        """Whether the program has written to a compressed gradient since it arrived."""
        return any(gradient._version != version for gradient, version in self._versions)

    def compressed(self, gradient: torch.Tensor, name: str, parameter: torch.Tensor) -> Taken:
        """Take a compressed gradient: Horovod gets a ticket. A ticket of zero on all ranks means no gradient."""
        if name not in self.taken:
            used = self.used[name] = self._plan.source.fresh(parameter) or self._any(gradient)
            in_use = isinstance(used, torch.Tensor) or used
            ticket = self._plan.tickets.fill(name, in_use, gradient.device)
            self.in_use |= in_use
            self.taken[name] = Taken(ticket, gradient, True)
            self._count(gradient)
        return self.taken[name]

    def _any(self, gradient: torch.Tensor) -> bool | torch.Tensor:
        """Whether any value is not zero."""
        if gradient.is_cuda and self._plan.source.sums_tickets:
            return gradient.any()
        few = gradient.view(-1)[:64] if gradient.is_contiguous() else gradient  # nearly always, these say it
        return bool(few.any()) or bool(gradient.any())

    def uncompressed(self, gradient: torch.Tensor, name: str, slot: Slot | None) -> Taken:
        """Take a gradient that is skipped, or at 32 bits. It travels with what waits in its residual."""
        if name not in self.taken:
            if slot is not None and self._plan.buckets[slot.bucket].residuals.releases:
                uninterrupted(lambda: self._hand_over(gradient, name, slot))
            else:
                self._hand_over(gradient, name, slot)
        return self.taken[name]

    def _hand_over(self, gradient: torch.Tensor, name: str, slot: Slot | None) -> None:
        wire = wire_form(gradient)
        # A gradient that is not fresh was reduced before, with its residual.
        if slot is not None and self._fresh:
            wire = self._plan.buckets[slot.bucket].residuals.join(slot, wire)
        if slot is None and self._plan.settings.fp16_skipped and wire.dtype is torch.float32:
            wire = wire.half()
        if wire is gradient and not self._in_place:
            wire = gradient.clone()
        self._tally.hands_over(name, wire.numel() * wire.element_size(), 4 * wire.numel())
        self.taken[name] = Taken(wire, gradient, False)

    def slot_of(self, gradient: torch.Tensor) -> Slot:
        """The place of a compressed gradient that was taken. Call it when all were."""
        if not self._slots:
            slots = self._plan.slots
            self._slots = {id(each.gradient): slots[name] for name, each in self.taken.items() if each.compressed}
        return self._slots[id(gradient)]

    def set_apart(self, waiting: list[torch.Tensor]) -> None:
        """Give memory of its own to each gradient that shares some with another one; it keeps its values.

        On another rank they may not share any, and have different means.

        Args:
            waiting: the compressed gradients whose means are not written yet. Others share nothing.
        """
        copied = [
            each.gradient for each in self.taken.values() if not each.compressed and each.wire is not each.gradient
        ]
        written = waiting + copied
        self.apart = {id(written[i]): written[i].clone() for i in overlapping(written)}

    def _count(self, gradient: torch.Tensor) -> None:
        """Note the gradient's version, if only the program writes to it with torch operators.

        Kernels write a mean by its address, which does not count; a copy counts. Views of one tensor share a version,
        and tensors made in inference mode have none.
        """
        kernel = kernels.backends.get("cpu" if gradient.is_cpu else gradient.device.type, portable)
        if kernel is portable or gradient.dtype is not torch.float32 or not gradient.is_contiguous():
            return
        if not gradient.is_inference() and not gradient._is_view():
            self._versions.append((gradient, gradient._version))
