"""Estimates for reports, which no training step needs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch

from hvd_dyncomp.checks import shown
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.sessions.session import Session


@torch.no_grad()
def relative_errors(quantizer: Session, gradients: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """Return, by parameter name, the estimated error of each averaged gradient relative to its norm.

        errors = relative_errors(quantizer, {name: p.grad for name, p in model.named_parameters()})

    Parameters with fewer than `min_numel` values are counted together: all of a bucket under the name of the first.
    Call it after the gradients have been averaged, and before they are clipped, unscaled or zeroed. It waits for
    the device, but not for other ranks.

    The estimate is computed from this rank's residuals, as if the residuals of all ranks were equally large and
    independent. (If more than two ranks reduce together, the second quantization adds about the same error again.)
    Below one bit, a value stays in the residual for many steps, so the residual may be larger than the averaged
    gradient. Tensors without a gradient and tensors that another worker of this host quantizes are left out;
    without error feedback, or before the first step, the result is empty.

    Args:
        quantizer: a `DynamicQuantizer`, an `Averager`, or what `compress` has returned.
        gradients: means of the latest step, by the names in `quantizer.state_dict()["residuals"]`, of the parameters'
            shapes; None for a parameter without one. Of a model wrapped by `DistributedDataParallel`: the names in
            `model.module`. DTensors stand for this rank's shard.

    Returns:
        Norm of the error divided by the norm of the averaged gradient, by parameter name.

    Raises:
        TypeError: `quantizer` is something else.
        ValueError: a gradient's name is none that the quantizer knows, such as one that begins with "module.".
    """
    if not isinstance(quantizer, Session):
        raise TypeError(
            f"quantizer must be a DynamicQuantizer, an Averager or what compress has returned, got {shown(quantizer)}"
        )
    plan = quantizer._plan
    known = {name for name, _ in plan.source.named} if plan is not None else gradients.keys()
    for name, gradient in gradients.items():
        if gradient is not None and name not in known:
            raise ValueError(
                f"gradients must have the names that the quantizer has, such as {min(known, default='')}, got {name}"
            )
    # The mean lacks factor * r for a residual r. Residuals of several ranks are independent: their squares add up.
    squares: dict[str, tuple[float, float]] = {}
    for bucket in plan.buckets if plan is not None else ():
        parts = list(_parts(bucket, gradients))
        norms = [_norm(values) for _, residual, gradient in parts for values in (residual, gradient)]
        if not parts:
            continue
        several = plan.source.factor**2 * len(bucket.section.ranks)  # type: ignore[union-attr]  # there is one
        for (name, _, _), (error, gradient) in zip(parts, torch.stack(norms).view(-1, 2).tolist(), strict=True):
            before = squares.get(name, (0.0, 0.0))
            squares[name] = before[0] + several * error**2, before[1] + gradient**2
    ratios = {name: total / whole for name, (total, whole) in squares.items() if whole}
    return {name: math.sqrt(ratio) for name, ratio in ratios.items() if math.isfinite(ratio)}


def _norm(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dtype=torch.float64)


def _parts(
    bucket: Bucket, gradients: Mapping[str, torch.Tensor | None]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """For each parameter that this rank quantizes first, as far as it does: counted name, residual, gradient."""
    if not bucket.residuals.enabled:
        return
    section = bucket.residuals.own_range
    first_small = next((slot.name for slot in bucket.slots if slot.small), "")
    for slot in bucket.slots:
        gradient = gradients.get(slot.name)
        if gradient is not None and hasattr(gradient, "to_local"):  # a DTensor
            gradient = gradient.to_local()
        first, last = max(slot.start, section.start), min(slot.start + slot.numel, section.stop)
        if first < last and gradient is not None and gradient.layout is torch.strided:
            residual = bucket.residuals.own[first - section.start : last - section.start]
            flat = gradient.permute(slot.order).reshape(-1)
            yield first_small if slot.small else slot.name, residual, flat[first - slot.start : last - slot.start]
