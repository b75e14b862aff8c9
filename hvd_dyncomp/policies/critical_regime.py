"""More bits while gradients change fast: Accordion's critical regimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_dyncomp.checks import finite, integer, shown
from hvd_dyncomp.levels import check_level
from hvd_dyncomp.policies.arguments import metric_name, metric_of
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history


class CriticalRegime(Policy):
    """Two levels: `high` while the norm of the gradients changes fast, `low` otherwise.

    The rule of Accordion (Agarwal et al., 2021, https://arxiv.org/abs/2010.16248): every `interval` epochs, compare the
    gradient norm G with the norm `interval` epochs before. The next epochs are critical, at the high level, if

        | G_before - G | >= eta * G_before

    Epochs before the first comparison are critical, too. The rule protects the start of training, where `StepFunction`
    with ascending levels saves most. Two things differ from the paper: all tensors have the same level, and a drop
    of the learning rate alone is not critical. (With a smooth schedule every epoch would be.)

    The norm is one of the metrics, so it costs no collective. As in the paper, it should be the norm of the gradients
    summed (or averaged) over the whole epoch: the norm of a single step is mostly noise. Sum the gradients after their
    exchange: then all ranks have the same sum, and the residuals of one step enter the sum in later steps.
    `launch/train/metrics.py` does this in a few lines. If epochs differ in their number of steps, average.

    Args:
        low: level of ordinary epochs, bits per value.
        high: level of critical epochs, more than `low`.
        monitor: name of the metric with the norm, in any unit.
        eta: relative change of the norm at which epochs become critical.
        interval: epochs between two comparisons. The paper has 10 in runs of 300 epochs.

    Raises:
        ValueError: an argument is out of range or of another type; the message names it and its value.

    Examples:
        >>> policy = CriticalRegime(low=1, high=4, interval=1)
        >>> policy.decide([Record(0, {"gradient_norm": 2.0})])
        Decision(bits=4, reason='critical: nothing to compare with yet')
        >>> policy.decide([Record(0, {"gradient_norm": 2.0}), Record(1, {"gradient_norm": 1.9})])
        Decision(bits=1, reason='gradient_norm went from 2 to 1.9')
    """

    def __init__(
        self,
        low: float = 4,
        high: float = 16,
        *,
        monitor: str = "gradient_norm",
        eta: float = 0.5,
        interval: int = 10,
    ) -> None:
        self.low, self.high = check_level("low", low), check_level("high", high)
        if self.low >= self.high:
            raise ValueError(f"high must be more bits than low ({self.low}), got {shown(high)}")
        self.monitor = metric_name("monitor", monitor)
        self.eta = finite("eta", eta, 0)
        self.interval = integer("interval", interval, 1)

    def config(self) -> dict[str, Any]:
        return {"policy": "CriticalRegime", **vars(self)}

    def decide(self, history: Sequence[Record]) -> Decision:
        norms = [metric_of(record, self.monitor, self) for record in check_history(history)]
        compared = norms[self.interval - 1 :: self.interval]
        if len(compared) < 2:
            return Decision(self.high, "critical: nothing to compare with yet")
        before, now = compared[-2:]
        went = f"{self.monitor} went from {before:.4g} to {now:.4g}"
        # A norm of 0 says nothing: critical, as in the paper.
        if abs(before - now) >= self.eta * abs(before):
            return Decision(self.high, f"critical: {went}")
        return Decision(self.low, went)
