"""Which gradient of an optimizer travels in which bucket. Each rank makes its own; handshakes compare them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.exchange import residuals
from hvd_dyncomp.exchange.binding import Binding
from hvd_dyncomp.exchange.buckets import make_buckets
from hvd_dyncomp.exchange.codec import WIRE_VERSION, checksum
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.transport.base import Transport

logger = logging.getLogger(__name__)


class Plan:
    """What there is to know before a step.

    Args:
        optimizer: Horovod's.
        names: of its parameters; None for its own.
        settings: see there.
        skip: as `make_buckets` has it.
        state: of a quantizer, whose residuals are taken over; None for none.
        transport: among all workers.

    Attributes:
        binding: the optimizer.
        transport: among the optimizer's ranks.
        settings: see above.
        buckets: what travels together, with its residuals.
        slots: a compressed parameter's place, by name.
        composition: checksum over everything that the ranks must agree about, but for level and step.

    Raises:
        ValueError: a parameter has no name, or the state is another rank's or of other parameters.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        names: dict[torch.Tensor, str] | None,
        settings: Settings,
        skip: Skip | None,
        state: Mapping[str, Any] | None,
        transport: Transport,
    ) -> None:
        self.settings = settings
        self.binding = Binding(optimizer, names, transport)
        self.transport = self.binding.transport
        rank, world_size = self.binding.rank, self.binding.world_size
        self.buckets, self.slots = make_buckets(
            self.binding.named,
            min_numel=settings.min_numel,
            bucket_bytes=settings.bucket_bytes,
            skip=skip,
            block_size=settings.block_size,
            error_feedback=settings.error_feedback,
            rank=rank,
            world_size=world_size,
        )
        if state is not None:
            residuals.restore(self.buckets, state, rank, world_size, self.binding.factor)
        self.composition = checksum(json.dumps(self._about()))
        logger.info(
            "bound to %s: %d of %d parameters compressed, in %d buckets",
            type(optimizer).__name__,
            len(self.slots),
            len(self.binding.named),
            len(self.buckets),
        )

    def about(self, bits: int, step: int) -> dict[str, Any]:
        """What the ranks tell each other when they disagree (`introduction.Introduction`)."""
        about = self._about()
        return {**about, "settings": {"bits": bits, "step": step, **about["settings"]}}

    def _about(self) -> dict[str, Any]:
        fixed = {"wire version": WIRE_VERSION, "world size": self.binding.world_size, **self.settings._asdict()}
        parameters = [[name, list(p.shape), name in self.slots] for name, p in self.binding.named]
        return {"settings": fixed, "parameters": parameters}
