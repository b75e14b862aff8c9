"""The fewest bits whose error stays within a bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvd_dyncomp.checks import finite
from hvd_dyncomp.policies.arguments import ascending_levels, metric_of
from hvd_dyncomp.policies.base import Decision, Policy, Record, check_history


class ErrorBudget(Policy):
    """The lowest of some levels whose expected error is within a bound; the highest, where none is.

    The error of a level is what one exchange leaves of the squared norm of gradient and residual, from 0 to 1. It
    depends on the training only where tensors have levels of their own (`allocation="error"`): a budget then leaves
    the less, the more the energies of gradients differ between tensors. With one level for all it does not, and this
    policy always decides alike: `Static` says it more plainly.

    What to hand to `Controller.step`, with the other metrics and on every rank, is `quantizer.expected_errors()`:

        controller.step({"val_accuracy": accuracy, **quantizer.expected_errors()}, num_samples=...)

    Nothing holds the level: the errors of the epoch before decide alone, so that it may fall as well as rise.

    Args:
        levels: ascending, bits a value; up to 8, above which nothing is left to speak of.
        bound: share of the squared norm that a step may leave behind, from 0 to 1.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; the message names it and its value.

    Example:
        >>> policy = ErrorBudget(levels=(0.25, 1), bound=0.5)
        >>> policy.decide([Record(0, {"expected_error_0.25": 0.48, "expected_error_1": 0.28})])
        Decision(bits=0.25, reason='expected_error_0.25 is 0.48')
    """

    def __init__(self, levels: Sequence[float] = (0.25, 0.5, 1, 2, 4), *, bound: float = 0.5) -> None:
        self.levels = ascending_levels(levels)
        self.bound = finite("bound", bound, 0)

    def config(self) -> dict[str, Any]:
        return {"policy": "ErrorBudget", "levels": list(self.levels), "bound": self.bound}

    def decide(self, history: Sequence[Record]) -> Decision:
        history = check_history(history)
        if not history:
            return Decision(self.levels[-1], "start")
        errors = {bits: metric_of(history[-1], expected_error(bits), self) for bits in self.levels}
        for bits, error in errors.items():
            if error <= self.bound:
                return Decision(bits, f"{expected_error(bits)} is {error:.3g}")
        return Decision(self.levels[-1], f"no level has an error of {self.bound:.3g} or less")


def expected_error(bits: float) -> str:
    """The name of the metric that is a level's expected error."""
    return f"expected_error_{bits:g}"
