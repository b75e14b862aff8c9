"""More bits when a metric stops improving: `ReduceLROnPlateau`'s rule, applied to levels."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

from hvd_dyncomp.checks import finite, integer, one_of, shown
from hvd_dyncomp.policies.arguments import ACCURACIES, AUTO, ascending_levels, chosen, metric_name, metric_of, names_of
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history

logger = logging.getLogger(__name__)

_USUAL = {"min": ("val_loss", "eval_loss"), "max": ACCURACIES}
_INSTEAD = (("loss", "Plateau(monitor={!r})"), ("acc", "Plateau(monitor={!r}, mode='max')"))


class Plateau(Policy):
    """Climb from level to level, one per plateau, by the rule of `torch.optim.lr_scheduler.ReduceLROnPlateau`.

    An epoch is bad unless `monitor` is better than the best so far by more than `threshold`. After more than `patience`
    bad epochs in a row the level rises. During the next `cooldown` epochs no epoch counts as bad. The level never
    falls.

    Arguments and defaults are torch's, but `levels` replace `factor` and `min_lr`. A factor on bits would give levels
    that do not exist (twice 5, half of 3), and would treat unequal steps alike (going from 8 to 16 bits gains almost
    nothing, from 1 to 2 bits much). DAdaQuant (Hönig et al., 2021, https://arxiv.org/abs/2111.00465) raises levels in
    this way when the loss of federated training stalls.

    A plateau caused by the learning rate looks the same. If the learning rate falls on plateaus, too, give it the
    longer patience, so that the level moves first.

    Args:
        levels: ascending levels, bits per value; the last may be 32, uncompressed.
        monitor: name of the metric, in every epoch. "auto": the first of "val_loss" and "eval_loss" (with mode="max"
            "val_accuracy" and "eval_accuracy") that the first epoch has.
        mode: "min" if less of it is better, "max" if more is.
        patience: number of bad epochs in a row that are tolerated; one more raises the level.
        threshold: least improvement that counts, at least 0; in "rel" mode less than 1.
        threshold_mode: "rel": better than best * (1 - threshold), with "max" best * (1 + threshold); "abs": better by
            more than `threshold`, in the metric's unit.
        cooldown: epochs after a rise in which none counts as bad.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; the message names it and its value.

    Examples:
        >>> policy = Plateau(levels=(2, 4), patience=1)
        >>> losses = [1.0, 0.5, 0.5, 0.5]
        >>> policy.decide([Record(epoch, {"val_loss": loss}) for epoch, loss in enumerate(losses)])
        Decision(bits=4, reason='2 epochs without a better val_loss than 0.5')
    """

    def __init__(
        self,
        levels: Sequence[float] = (4, 8, 16),
        *,
        monitor: str = AUTO,
        mode: str = "min",
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
    ) -> None:
        self.levels = ascending_levels(levels)
        self.monitor = metric_name("monitor", monitor)
        self.mode = one_of("mode", mode, ("min", "max"))
        if self.mode == "min" and "acc" in self.monitor.lower():
            logger.warning(
                "Plateau(monitor=%r): lower values count as better; for an accuracy, pass mode='max'", self.monitor
            )
        if self.mode == "max" and "loss" in self.monitor.lower():
            logger.warning(
                "Plateau(monitor=%r, mode='max'): higher values count as better; for a loss, pass mode='min'",
                self.monitor,
            )
        self.patience = integer("patience", patience, 0)
        self.threshold = finite("threshold", threshold, 0)
        self.threshold_mode = one_of("threshold_mode", threshold_mode, ("rel", "abs"))
        if self.threshold_mode == "rel" and self.threshold >= 1:
            raise ValueError(f"threshold must be less than 1 if threshold_mode is 'rel', got {shown(threshold)}")
        self.cooldown = integer("cooldown", cooldown, 0)

    def config(self) -> dict[str, Any]:
        return {"policy": "Plateau", **vars(self), "levels": list(self.levels)}

    def decide(self, history: Sequence[Record]) -> Decision:
        if not check_history(history):
            return Decision(self.levels[0], "start")
        monitor = chosen(names_of(self.monitor, _USUAL[self.mode]), history)
        best = math.inf if self.mode == "min" else -math.inf
        place = bad = cooling = 0
        reason = "hold"
        for record in history:
            value = metric_of(record, monitor, self, _INSTEAD)
            better = self._better(value, best)
            best, bad = (value, 0) if better else (best, bad + 1)
            if cooling:
                cooling, bad = cooling - 1, 0
            reason = "hold"
            if bad > self.patience:
                if place + 1 < len(self.levels):
                    place += 1
                    reason = f"{bad} epochs without a better {monitor} than {best:.4g}"
                bad, cooling = 0, self.cooldown
        return Decision(self.levels[place], reason)

    def _better(self, value: float, best: float) -> bool:
        sign = 1 if self.mode == "max" else -1
        limit = best + sign * self.threshold if self.threshold_mode == "abs" else best * (1 + sign * self.threshold)
        return sign * value > sign * limit
