"""The norm of an epoch's gradients, for policies that watch it."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class GradientNorm:
    """The norm of the mean over an epoch's steps of what arrived of the gradients: the same on all ranks.

    Every step counts, which costs an addition to each parameter. A few of them would be cheaper, but the norm of a few
    is mostly that of their noise. In the sum of all, what one step owes has arrived with another.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._steps = 0

    @torch.no_grad()
    def add(self) -> None:
        """To be called after each exchange, before the optimizer's step."""
        self._steps += 1
        for total, parameter in zip(self._sums, self._parameters, strict=True):
            if parameter.grad is not None:
                total += parameter.grad

    def take(self) -> float:
        """The norm, of all parameters together; counting begins anew."""
        norms = torch.stack([torch.linalg.vector_norm(total, dtype=torch.float64) for total in self._sums])
        norm = float(norms.norm()) / max(self._steps, 1)
        for total in self._sums:
            total.zero_()
        self._steps = 0
        return norm
