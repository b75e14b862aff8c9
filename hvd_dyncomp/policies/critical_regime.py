"""More bits while gradients change fast: Accordion's critical regimes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_dyncomp.checks import finite, integer, shown
from hvd_dyncomp.levels import check_level
from hvd_dyncomp.policies.arguments import metric_name, metric_of
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history


class CriticalRegime(Policy):
    """Two levels: the high one while the norm of the gradients changes fast, the low one otherwise.

    The rule of Accordion (Agarwal et al., 2021). After every `interval` epochs the norm G of the gradients is compared
    with what it was `interval` epochs before. The epochs that follow are critical, and have the high level, if

        | G_before - G | >= eta * G_before

    and those before the first comparison are. It protects the start of a training, where `StepFunction` with an
    ascending ladder saves most. Unlike the source, one level serves all tensors, and a fall of the learning rate alone
    is no critical epoch: with a smooth schedule all would be.

    The norm comes with the other metrics, so that it costs no collective. As in the source, it should be that of the
    gradients summed up (or averaged) over the whole epoch: the norm of a single step is mostly that of its noise. Take
    them after their exchange: then all ranks have the same ones, and what a step leaves in residuals arrives later in
    the same sum.
    `launch/training/gradients.py` has it in a few lines. Where the number of steps differs between epochs, average.

    Args:
        low: level of ordinary epochs, bits a value.
        high: of critical ones, more than `low`.
        monitor: name of the metric that is the norm, in any unit.
        eta: relative change of the norm from which on epochs are critical.
        interval: epochs between two comparisons. The source has 10 in trainings of 300 epochs.

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
