"""The paper's policy: level by level with accuracy or a stalled loss; uncompressed epochs when training is stuck."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hvd_dyncomp.checks import boolean, finite, integer, one_of, sequence, shown
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.policies.arguments import ACCURACIES, AUTO, chosen, metric_name, metric_of, names_of, one_way_levels
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history

logger = logging.getLogger(__name__)

_LOSSES = ("train_loss", "val_loss", "eval_loss")
_INSTEAD_OF_MONITOR = (("acc", "StepFunction(monitor={!r})"), ("loss", "Plateau(monitor={!r})"))
_INSTEAD_OF_LOSS = (("loss", "StepFunction(loss={!r})"), ("", "StepFunction(loss=None)"))


@dataclass
class _Trace:
    """The state of `StepFunction` after the epochs replayed so far."""

    monitor: str
    loss: str | None
    step: int = 0
    previous_loss: float | None = None
    slow_epochs: int = 0  # in a row: the loss improved by less than min_improvement
    stuck_epochs: int = 0  # since the step was reached, or since `monitor` improved
    best: float = -math.inf
    uncompressed_left: int = 0
    cooldown_left: int = 0


class StepFunction(Policy):
    """The paper's policy: raise the level as training progresses, and send some epochs uncompressed when it stalls.

    With levels l_0, l_1, ... and thresholds tau_1 < tau_2 < ..., after every epoch:

    1. Accuracy: the step is at least the number of thresholds that `monitor` has reached.
    2. Loss: if `loss` fell by less than the fraction `min_improvement` in each of `loss_patience` epochs in a row, the
       step rises by one.
    3. Ratchet: the step never falls. It ends at the last level.
    4. Stagnation: `uncompressed_epochs` epochs are sent at 32 bits, after more than `stagnation_patience` epochs at the
       same step without a new best of `monitor`. Training then returns to its step, and the next `cooldown` epochs do
       not count towards the next uncompressed epochs.

    The paper's own rule 4 is `stagnation="time"`: it counts all epochs at the same step. So it also acts on training
    that still improves: of 40 epochs that improve steadily below the first threshold, 7 are sent uncompressed, which
    makes 8.9 bits on average instead of 4.

    Uncompressed epochs do not count for rules 2 and 4. Rule 1 also applies in them; if it raises the step, the new step
    takes effect after the last of them.

    The paper's levels ascend. Descending ones, l_0 > l_1 > ..., protect the start of training instead: the same
    rules lead from step to step, to ever fewer bits. Rule 2 then means that a loss that hardly falls needs fewer bits;
    if that is not wanted, `loss=None` leaves the steps to the thresholds.

    Args:
        levels: levels below 32, bits per value, all ascending or all descending.
        thresholds: ascending values of `monitor`, one fewer than levels. Each must be reachable at the level before it.
            As a rule, take the values of `monitor` that an uncompressed run reaches after 15 % and 40 % of its epochs.
        monitor: name of the metric for the thresholds and for "plateau", in every epoch; more is better. "auto": the
            first of "val_accuracy" and "eval_accuracy" that the first epoch has.
        loss: name of the loss for rule 2, less is better; None switches the rule off. "auto": the first of
            "train_loss", "val_loss" and "eval_loss" that the first epoch has, otherwise "train_loss"; epochs without it
            do not count for rule 2, so without any loss the rule is off.
        min_improvement: relative fall of the loss below which an epoch is slow; at least 0, less than 1.
        loss_patience: slow epochs in a row that raise the step.
        stagnation: which epochs at the same step count towards uncompressed epochs. "plateau": epochs since the last
            new best of `monitor`; "time": all epochs; None: no epochs, which switches rule 4 off.
        stagnation_patience: number of such epochs that are tolerated; one more starts the uncompressed epochs.
        uncompressed_epochs: number of epochs that are then sent at 32 bits.
        cooldown: number of epochs after the uncompressed ones that do not count towards the next uncompressed epochs.
        uncompressed_at_top: whether training at the last level gets uncompressed epochs, too.
        total_epochs: number of epochs of the run, if known. Uncompressed epochs that could not end within the run are
            not started.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; the message names it and its value.

    Examples:
        >>> policy = StepFunction(levels=(4, 8, 16), thresholds=(0.5, 0.8))
        >>> policy.decide([Record(0, {"val_accuracy": 0.6, "train_loss": 1.0})])
        Decision(bits=8, reason='val_accuracy 0.6 reached 0.5')
    """

    def __init__(
        self,
        levels: Sequence[float] = (4, 8, 16),
        thresholds: Sequence[float] = (0.80, 0.88),
        *,
        monitor: str = AUTO,
        loss: str | None = AUTO,
        min_improvement: float = 0.01,
        loss_patience: int = 3,
        stagnation: str | None = "plateau",
        stagnation_patience: int = 5,
        uncompressed_epochs: int = 2,
        cooldown: int = 3,
        uncompressed_at_top: bool = False,
        total_epochs: int | None = None,
    ) -> None:
        self.levels = _usable_levels(levels)
        self.thresholds = _ascending_thresholds(thresholds, len(self.levels) - 1)
        self.monitor = metric_name("monitor", monitor)
        if "loss" in self.monitor.lower():
            logger.warning(
                "StepFunction(monitor=%r): higher values count as better; for a loss, use Plateau", self.monitor
            )
        self.loss = None if loss is None else metric_name("loss", loss)
        both = {*names_of(self.monitor, ACCURACIES)} & {*names_of(self.loss, _LOSSES)}
        if both:
            raise ValueError(f"loss must be another metric than monitor, got {both.pop()!r} for both")
        self.min_improvement = finite("min_improvement", min_improvement, 0)
        if self.min_improvement >= 1:
            raise ValueError(f"min_improvement must be less than 1, got {shown(min_improvement)}")
        self.loss_patience = integer("loss_patience", loss_patience, 1)
        self.stagnation = None if stagnation is None else one_of("stagnation", stagnation, ("time", "plateau"))
        self.stagnation_patience = integer("stagnation_patience", stagnation_patience, 0)
        self.uncompressed_epochs = integer("uncompressed_epochs", uncompressed_epochs, 1)
        self.cooldown = integer("cooldown", cooldown, 0)
        self.uncompressed_at_top = boolean("uncompressed_at_top", uncompressed_at_top)
        self.total_epochs = None if total_epochs is None else integer("total_epochs", total_epochs, 1)

    def config(self) -> dict[str, Any]:
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(self).items()}
        return {"policy": "StepFunction", **plain}

    def decide(self, history: Sequence[Record]) -> Decision:
        # Replay the whole history: so the policy has no state of its own. A thousand epochs take milliseconds.
        decision = Decision(self.levels[0], "start")
        if not check_history(history):
            return decision
        monitor = chosen(names_of(self.monitor, ACCURACIES), history)
        losses = names_of(self.loss, _LOSSES)
        if len(history) == 1:
            self._warn_of_units(monitor, history[0])
        trace = _Trace(monitor, chosen(losses, history) if losses else None)
        for record in history:
            decision = self._advance(trace, record)
        return decision

    def _warn_of_units(self, monitor: str, record: Record) -> None:
        """Warn if accuracy and thresholds differ in unit, fraction or percent: the levels would be wrong silently."""
        value = record.metrics.get(monitor, 0.0)
        if "acc" not in monitor.lower() or not self.thresholds:
            return
        too_high, too_low = 0 < value <= 1 < self.thresholds[0], self.thresholds[-1] <= 1 < value
        if too_high or too_low:
            logger.warning(
                "%s is %.4g and thresholds are %s: if one is a fraction and the other percent, the level will %s; "
                "give both in the same unit",
                monitor,
                value,
                self.thresholds,
                "never leave the first step" if too_high else "go to the last step at once",
            )

    def _advance(self, trace: _Trace, record: Record) -> Decision:
        """Replay one epoch: move `trace`, return the decision after it."""
        value = metric_of(record, trace.monitor, self, _INSTEAD_OF_MONITOR)
        was_uncompressed = trace.uncompressed_left > 0
        improved = value > trace.best
        trace.best = max(trace.best, value)
        slow = self._count_slow(trace, record, was_uncompressed)

        raised = self._raise_step(trace, value, slow)
        if was_uncompressed:
            trace.uncompressed_left -= 1
            if trace.uncompressed_left > 0:
                return Decision(UNCOMPRESSED, f"uncompressed, {trace.uncompressed_left} more")
            trace.cooldown_left, trace.stuck_epochs = self.cooldown, 0
            return Decision(self.levels[trace.step], "uncompressed epochs ended")
        if raised:
            trace.stuck_epochs = 0
            self._cool(trace)
            return Decision(self.levels[trace.step], raised)
        if self._is_stuck(trace, improved) and self._may_leave_off(trace, record.epoch):
            trace.uncompressed_left, trace.slow_epochs = self.uncompressed_epochs, 0
            return Decision(
                UNCOMPRESSED,
                f"uncompressed: {trace.stuck_epochs} epochs at {self.levels[trace.step]} bits"
                + (" without a better " + trace.monitor if self.stagnation == "plateau" else ""),
            )
        return Decision(self.levels[trace.step], "hold")

    def _count_slow(self, trace: _Trace, record: Record, was_uncompressed: bool) -> bool:
        """Count slow epochs; True when there are enough of them."""
        if trace.loss is None or (self.loss == AUTO and trace.loss not in record.metrics):
            return False
        loss, before = metric_of(record, trace.loss, self, _INSTEAD_OF_LOSS), trace.previous_loss
        trace.previous_loss = loss
        if was_uncompressed or before is None:
            trace.slow_epochs = 0
            return False
        improvement = (before - loss) / max(abs(before), 1e-12)
        trace.slow_epochs = trace.slow_epochs + 1 if improvement < self.min_improvement else 0
        return trace.slow_epochs >= self.loss_patience

    def _raise_step(self, trace: _Trace, value: float, slow: bool) -> str:
        """Apply rules 1 to 3; return the reason if the step rose, otherwise ""."""
        before, top = trace.step, len(self.levels) - 1
        reached = sum(value >= threshold for threshold in self.thresholds)
        trace.step = max(before, reached, min(before + slow, top))
        if slow:
            trace.slow_epochs = 0
        if trace.step == before:
            return ""
        if trace.step == reached:
            return f"{trace.monitor} {value:.4g} reached {self.thresholds[trace.step - 1]:.4g}"
        return f"{trace.loss} improved by less than {self.min_improvement:.3g} for {self.loss_patience} epochs"

    def _cool(self, trace: _Trace) -> bool:
        """Count down the cooldown; return whether this epoch belonged to it."""
        cooling = trace.cooldown_left > 0
        trace.cooldown_left -= cooling
        return cooling

    def _is_stuck(self, trace: _Trace, improved: bool) -> bool:
        if self._cool(trace):
            return False
        trace.stuck_epochs = 0 if self.stagnation == "plateau" and improved else trace.stuck_epochs + 1
        return self.stagnation is not None and trace.stuck_epochs > self.stagnation_patience

    def _may_leave_off(self, trace: _Trace, epoch: int) -> bool:
        if trace.step == len(self.levels) - 1 and not self.uncompressed_at_top:
            return False
        return self.total_epochs is None or epoch + self.uncompressed_epochs < self.total_epochs


def _usable_levels(levels: Sequence[float]) -> tuple[float, ...]:
    plain = one_way_levels(levels)
    if UNCOMPRESSED in plain:
        raise ValueError(f"levels must be below 32, which is uncompressed, got {shown(levels)}")
    return plain


def _ascending_thresholds(thresholds: Sequence[float], expected: int) -> tuple[float, ...]:
    plain = tuple(finite("thresholds", value) for value in sequence("thresholds", thresholds))
    if len(plain) != expected:
        raise ValueError(f"thresholds must be one fewer than levels ({expected}), got {shown(thresholds)}")
    if any(a >= b for a, b in zip(plain, plain[1:], strict=False)):
        raise ValueError(f"thresholds must ascend, got {shown(thresholds)}")
    return plain
