"""Which gradient of an optimizer travels in which bucket: agreed between the ranks before the first one does."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from hvd_dyncomp.exchange import introduction, residuals
from hvd_dyncomp.exchange.binding import Binding
from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.codec import WIRE_VERSION

logger = logging.getLogger(__name__)


class Settings(NamedTuple):
    """How gradients travel; `DynamicQuantizer` has the meaning of each. The same on all ranks."""

    error_feedback: bool
    block_size: int
    min_numel: int
    bucket_bytes: int


class Plan:
    """What there is to know before a step.

    Attributes:
        binding: the optimizer.
        buckets: what travels together, with its residuals.
        slots: a compressed parameter's place, by name.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str] | None,
        settings: Settings,
        state: Mapping[str, Any] | None,
    ) -> None:
        self.binding = Binding(optimizer, names)
        rank, world_size = self.binding.rank, self.binding.world_size
        self.buckets, self.slots = make_buckets(
            self.binding.named, rank=rank, world_size=world_size, **settings._asdict()
        )
        if state is not None:
            residuals.restore(self.buckets, state, rank, world_size, self.binding.factor)

    def introduce(self, about: dict[str, Any]) -> None:
        """Compares it with the other ranks'. Collective, blocking.

        Raises:
            LockstepError: on every rank: they differ in it or in `about`, or a rank has none.
        """
        shapes = [(name, tuple(parameter.shape)) for name, parameter in self.binding.named]
        carries = any(bucket.carries for bucket in self.buckets)
        if introduction.introduce(about, shapes, carries, self.binding.process_set):
            # On all ranks alike, as it decides about what travels: in float32, even if gradients are float16.
            for bucket in self.buckets:
                bucket.carries = True


def agree(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str] | None,
    settings: Settings,
    state: Mapping[str, Any] | None,
    about: dict[str, Any],
) -> Plan:
    """A plan that all ranks share. Collective, blocking.

    Args:
        optimizer: Horovod's.
        names: of its parameters; None for its own.
        settings: see there.
        state: of a quantizer, whose residuals are taken over; None for none.
        about: what else must be the same on all ranks, by the names that error messages use.

    Raises:
        Exception: this rank cannot make a plan, most often a ValueError; the others, who wait for it, raise
            LockstepError.
        LockstepError: on every rank: their plans or settings differ.
    """
    try:
        plan = Plan(optimizer, names, settings, state)
    except Exception as error:
        introduction.give_up(error, getattr(optimizer, "process_set", None))
        raise
    plan.introduce({"wire version": WIRE_VERSION, "world size": plan.binding.world_size, **about, **settings._asdict()})
    logger.info(
        "bound to %s: %d of %d parameters compressed, in %d buckets",
        type(optimizer).__name__,
        len(plan.slots),
        len(plan.binding.named),
        len(plan.buckets),
    )
    return plan
