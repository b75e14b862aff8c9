"""Tickets: what Horovod reduces in place of compressed gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Tickets:
    """One float32 per compressed parameter. After the reduction it is more than 0 if any rank has a gradient.

    Args:
        names: of the parameters.
        on_device: whether a ticket must be on the gradient's device, because Horovod may reduce it in one call with
            uncompressed gradients. Otherwise all are in main memory, so that Horovod waits for no GPU.
    """

    nbytes = 4

    def __init__(self, names: Iterable[str], *, on_device: bool) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._on_device = on_device
        # Numpy writes them, one per gradient: a torch operator for one value costs more than everything else.
        values = torch.zeros(len(self._index), dtype=torch.float32, device="cpu")
        self._each, self._values = list(values.split(1)), values.numpy()

    def fill(self, name: str, in_use: bool, device: torch.device) -> torch.Tensor:
        """A parameter's ticket for one reduction: 1 if this rank has a gradient, otherwise 0; (1,) float32.

        Args:
            name: of the parameter.
            in_use: whether this rank has a gradient.
            device: of the gradient.
        """
        if self._on_device and device.type != "cpu":
            return torch.full((1,), float(in_use), dtype=torch.float32, device=device)
        index = self._index[name]
        self._values[index] = in_use
        return self._each[index]
