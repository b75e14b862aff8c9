"""The states of a quantizer; `lifecycle` has the transitions between them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.on_horovod.gradients import OptimizerPlan


class Unbound(NamedTuple):
    """No optimizer is known: before the first gradient, after a state was loaded, or when ranks may have come or gone.

    Attributes:
        residuals: what the next plan takes over; None for nothing.
    """

    residuals: Mapping[str, Any] | None


class Bound(NamedTuple):
    """Between two steps."""

    plan: OptimizerPlan


class Stepping(NamedTuple):
    """From the first gradient of a step until it is collected.

    Attributes:
        pending: what Horovod keeps of the step.
    """

    plan: OptimizerPlan
    step: Step
    pending: dict

    @property
    def forgotten(self) -> bool:
        """Whether Horovod will never ask for this step's gradients."""
        optimizer = self.plan.source.optimizer
        return optimizer is None or horovod_optimizer.pending_of(optimizer) is not self.pending


class Failed(NamedTuple):
    """This rank cannot make a plan. It raises as soon as the other ranks know."""

    step: FailedStep
    residuals: Mapping[str, Any] | None


State = Unbound | Bound | Stepping | Failed
