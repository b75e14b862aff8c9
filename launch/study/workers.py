"""Simulated workers: an `Averager` each, with all ranks in this process; and how many bytes one sends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvd_dyncomp import Averager, Controller, kernels
from hvd_dyncomp.kernels.scales import values_per_scale
from hvd_dyncomp.simulate import InProcessTransport, World

BLOCK_SIZE = 512
HEADER_BYTES = 8  # of a message: the number of a step


def message_bytes(values: int, bits: float) -> int:
    """Bytes of so many values as one run of blocks with their scales, header included."""
    size = values_per_scale(bits, BLOCK_SIZE)
    return HEADER_BYTES - (-values // BLOCK_SIZE) * (BLOCK_SIZE // size * kernels.block_bytes(bits, size))


class _Level(Controller):
    """The level that each step is told."""

    bits = 4.0  # type: ignore[assignment]  # of a controller it cannot be set


class Workers:
    """Workers that average one flat gradient each.

    Args:
        size: how many.
        values: in a gradient.
    """

    def __init__(self, size: int, values: int) -> None:
        self._world = World(size, hosts=list(range(size)))
        named = [("gradient", torch.zeros(values))]

        def program(transport: InProcessTransport) -> Averager:
            return Averager(named, _Level(transport=transport), min_numel=1, block_size=BLOCK_SIZE)

        self._averagers = self._world.run(program)

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
        return reduced[0]

    def residuals(self, rank: int) -> dict[str, Any]:
        """A worker's state."""
        return self._averagers[rank].state_dict()
