"""What a policy is (`Policy` has the contract), its input and its answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_dyncomp.checks import boolean, integer, number, sequence, shown
from hvd_dyncomp.levels import UNCOMPRESSED, check_level


class Decision(NamedTuple):
    """What a policy decides: a named tuple.

    Attributes:
        bits: level of the next epoch, bits per value, one of `LEVELS`.
        reason: why, for people; it appears in logs, in `Controller.history` and in reports.

    Examples:
        >>> Decision(4, "static").bits
        4
    """

    bits: float
    reason: str


@dataclass(frozen=True)
class Record:
    """One finished epoch: its number, its metrics averaged over the ranks, and the decision after it.

    Attributes:
        epoch: its number, from 0.
        metrics: means over the ranks by name, sorted by name.
        bits: the level decided after this epoch, which is that of the next one; bits per value.
        reason: that of the `Decision`.
        usable: False if metrics were not finite or the policy failed: policies never see that epoch.

    Raises:
        ValueError, TypeError: a field is out of range or of another type; the message names it and its value.

    Examples:
        >>> Record(3, {"val_loss": 0.5}, bits=4, reason="static").metrics
        {'val_loss': 0.5}
    """

    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    bits: float = UNCOMPRESSED
    reason: str = ""
    usable: bool = True

    def __post_init__(self) -> None:
        # A copy: the caller may go on filling its own.
        object.__setattr__(self, "epoch", integer("epoch", self.epoch, 0))
        object.__setattr__(self, "metrics", check_metrics(self.metrics))
        object.__setattr__(self, "bits", check_level("bits", self.bits))
        if not isinstance(self.reason, str):
            raise TypeError(f"reason must be a string, got {shown(self.reason)}")
        boolean("usable", self.usable)


def check_metrics(metrics: Any) -> dict[str, float]:
    """A copy of `metrics`: names sorted, values plain floats. NaN and infinities pass.

    Raises:
        TypeError: `metrics` is not a mapping from strings.
        ValueError: a value is not a number; the message names it.
    """
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise TypeError(f"metrics must be a mapping from names to numbers, got {shown(metrics)}")
    return {name: number(f"metrics[{name!r}]", metrics[name]) for name in sorted(metrics)}


def check_history(history: Any) -> Sequence[Record]:
    """Return `history` if `Policy.decide` can take it.

    Raises:
        TypeError: it is not a sequence of records.
        ValueError: its epochs do not ascend.
    """
    epochs = []
    for record in sequence("history", history):
        if not isinstance(record, Record):
            raise TypeError(f"history must be a sequence of Records, got {shown(record)} in it")
        epochs.append(record.epoch)
    for earlier, later in zip(epochs, epochs[1:], strict=False):
        if earlier >= later:
            raise ValueError(f"history must have ascending epochs, got {later} after {earlier} in {shown(history)}")
    return history


class Policy(ABC):
    """Base class of policies: choose the next level from the history of metrics, in plain Python.

    The contract:

    - `decide(history)` gets the records of all finished epochs, oldest first, and returns the level of the next epoch.
      An empty history asks for the level of the first epoch. 32 bits means uncompressed.
    - `decide` is deterministic, and depends only on the configuration and the history. A resumed run that has the
      history therefore goes through the same levels as an uninterrupted one, with no further state to save.
    - After an epoch only rank 0 calls `decide`; `Controller` broadcasts the decision. (Every rank calls it once with an
      empty history, for the first level.)
    - `config()` returns plain data that tells two configurations apart.
    - `least` may name metrics of which the least of all ranks counts, instead of the mean weighted by `num_samples`.

    To add a policy, write one class with these two methods; there is nothing to register.

    Examples:
        >>> class EveryOther(Policy):
        ...     def decide(self, history):
        ...         return Decision(8 if len(history) % 2 else 2, "every other epoch")
        ...
        ...     def config(self):
        ...         return {"policy": "EveryOther"}
        >>> EveryOther().decide([Record(0, {"val_loss": 0.5})])
        Decision(bits=8, reason='every other epoch')
        >>> EveryOther()
        EveryOther()
    """

    @property
    def least(self) -> Collection[str]:
        """Names of metrics of which the records have the least value of all ranks, whatever their `num_samples`."""
        return ()

    @abstractmethod
    def decide(self, history: Sequence[Record]) -> Decision:
        """Return the level of the epoch after the last one in `history`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """Return the configuration as plain data, with the class's name under "policy"."""

    def __repr__(self) -> str:
        arguments = (f"{name}={value!r}" for name, value in self.config().items() if name != "policy")
        return f"{type(self).__name__}({', '.join(arguments)})"
