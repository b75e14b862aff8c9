"""How far the means of a step are off, by tensor: a rank's residuals, against the gradients."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.plan import Plan


@torch.no_grad()
def relative_errors(plan: Plan) -> dict[str, float]:
    """By `Slot.counted_as`; `DynamicQuantizer.errors` says of what.

    A residual r is missing from the mean as factor * r. Several ranks' are taken for independent: squares add up.
    """
    gradients = {name: parameter.grad for name, parameter in plan.binding.named if parameter.grad is not None}
    squares: dict[str, tuple[float, float]] = {}
    for bucket in plan.buckets:
        parts = list(_parts(bucket, gradients))
        norms = [_norm(values) for _, residual, gradient in parts for values in (residual, gradient)]
        if not parts:
            continue
        several = plan.binding.factor**2 * len(bucket.section.ranks)
        for (name, _, _), (error, gradient) in zip(parts, torch.stack(norms).view(-1, 2).tolist(), strict=True):
            before = squares.get(name, (0.0, 0.0))
            squares[name] = before[0] + several * error**2, before[1] + gradient**2
    ratios = {name: total / whole for name, (total, whole) in squares.items() if whole}
    return {name: math.sqrt(ratio) for name, ratio in ratios.items() if math.isfinite(ratio)}


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def _parts(bucket: Bucket, gradients: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Of each parameter, as far as this rank quantizes it first: whose it counts as, its residual, its gradient."""
    if not bucket.residuals.enabled:
        return
    section = bucket.residuals.extent.section
    for slot in bucket.slots:
        gradient = gradients.get(slot.name)
        first, last = max(slot.start, section.start), min(slot.start + slot.numel, section.stop)
        if first < last and gradient is not None and gradient.layout is torch.strided:
            residual = bucket.residuals.own[first - section.start : last - section.start]
            yield slot.counted_as, residual, gradient.reshape(-1)[first - slot.start : last - slot.start]
