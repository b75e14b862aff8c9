"""A policy at the wheel: the level of the next epoch, from what was measured after the last."""

from __future__ import annotations

import math
from typing import Any

from torch import nn

from hvd_dyncomp import Policy, Record
from study.tasks import Work
from train.gradients import GradientNorm


class Steering:
    """Asks a policy after every epoch, as `Controller` does on rank 0.

    An epoch with a metric that is not finite holds the level, and policies never see it. (`Controller` would release
    compression after two of them; a training that has come so far is lost in either case.)

    Args:
        policy: of the method; None for one that has none, and then nothing is measured.
        work: what is trained.
        model: the one.

    Attributes:
        bits: level of the epoch that comes; None without a policy.
    """

    def __init__(self, policy: Policy | None, work: Work, model: nn.Module) -> None:
        self._policy, self._work, self._model = policy, work, model
        self._history: list[Record] = []
        self._norm = GradientNorm(model.parameters()) if policy is not None else None
        self.bits = policy.decide([]).bits if policy is not None else None

    def stepped(self) -> None:
        """Called in each step, when all parameters have the gradients that arrived."""
        if self._norm is not None:
            self._norm.add()

    def after(self, epoch: int, train_loss: float) -> dict[str, Any]:
        """Validates, and lets the policy decide; returns what is worth writing down.

        Args:
            epoch: number of the one that is over.
            train_loss: its mean loss.
        """
        if self._policy is None or self._norm is None:
            return {}
        accuracy, loss = self._work.validate(self._model)
        own = {"val_accuracy": accuracy / 100, "val_loss": loss, "gradient_norm": self._norm.take()}
        metrics = {"train_loss": train_loss, **own}
        level, reason = self.bits, "held: not finite"
        if all(map(math.isfinite, metrics.values())):
            self._history.append(Record(epoch, metrics))
            self.bits, reason = self._policy.decide(self._history)
        return {"level": level, **{key: round(value, 6) for key, value in own.items()}, "reason": reason}
