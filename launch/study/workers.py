"""Simulated workers: an `Averager` each, with all ranks in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_dyncomp import Averager, Controller
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.transport.in_process import InProcessTransport, World
from study.codec import BLOCK_SIZE


class _Level(Controller):
    """The level that each step is told."""

    bits = 4.0  # type: ignore[assignment]  # of a controller it cannot be set


class Workers:
    """Workers that average one flat gradient each.

    Args:
        size: how many.
        values: in a gradient.
        feedback: whose quantization carries on what it loses: "both", that of the "workers" and not that of the sum
            (there is one from three workers on), or "none".
    """

    def __init__(self, size: int, values: int, *, feedback: str = "both") -> None:
        self._feedback = feedback
        self._world = World(size, hosts=list(range(size)))
        self._averagers = [
            Averager(
                [("gradient", torch.empty(values))],
                _Level(transport=transport),
                min_numel=1,
                block_size=BLOCK_SIZE,
                error_feedback=feedback != "none",
            )
            for transport in self._world.transports
        ]

    def mean(self, gradients: Sequence[torch.Tensor], bits: float) -> torch.Tensor:
        """Mean of (values,) float32 gradients, one a worker, as every worker gets it; a single one sends nothing.

        Args:
            bits: the level, less than 32.
        """
        reduced = [gradient.clone() for gradient in gradients]

        def program(transport: InProcessTransport) -> None:
            averager = self._averagers[transport.rank]
            averager.controller.bits = bits  # type: ignore[misc]
            averager.mean_([reduced[transport.rank]])

        self._world.run(program)
        if self._feedback == "workers":
            for bucket in self._buckets():
                bucket.residuals.shard.zero_()
        return reduced[0]

    def residuals(self, rank: int) -> dict[str, Any]:
        """A worker's state."""
        return self._averagers[rank].state_dict()

    def _buckets(self) -> list[Bucket]:
        """The one bucket of each worker."""
        return [bucket for averager in self._averagers for bucket in averager._plan.buckets]  # type: ignore[union-attr]
