"""Tickets: what Horovod reduces in the place of gradients that travel compressed, so that its bookkeeping goes on."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class Tickets:
    """One float32 for each compressed parameter: more than 0 after the reduction if any rank has a gradient for it.

    Args:
        names: of the parameters.
        on_device: whether a ticket must be where the gradient is: Horovod may reduce it in one call with gradients that
            travel uncompressed. Otherwise all are in main memory: Horovod is to wait for no GPU for them.
    """

    nbytes = 4

    def __init__(self, names: Iterable[str], *, on_device: bool) -> None:
        self._index = {name: index for index, name in enumerate(names)}
        self._on_device = on_device
        # Written once a gradient by numpy: an operator of torch's for one value costs more than all else.
        values = torch.zeros(len(self._index), dtype=torch.float32, device="cpu")
        self._each, self._values = list(values.split(1)), values.numpy()

    def fill(self, name: str, in_use: bool, device: torch.device) -> torch.Tensor:
        """A parameter's, for one reduction: 1 if this rank has a gradient and 0 if it has none; (1,) float32.

        Args:
            device: where the gradient is.
        """
        if self._on_device and device.type != "cpu":
            return torch.full((1,), float(in_use), dtype=torch.float32, device=device)
        index = self._index[name]
        self._values[index] = in_use
        return self._each[index]
