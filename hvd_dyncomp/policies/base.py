"""What a policy is: it decides which level comes next, from the history of metrics, in plain Python.

The contract of a policy:

- `decide(history)` gets the records of all finished epochs, oldest first, and says at how many bits the next epoch
  runs. An empty history asks for the level of the first epoch. 32 bits means uncompressed.
- It is deterministic and depends on nothing but its configuration and the history. A resumed run that has the history
  therefore traces the same levels as one that was never interrupted, with no further state to save.
- After an epoch it is called on rank 0 only; `Controller` broadcasts the decision. (Every rank asks once, with an empty
  history, for the level to begin with.)
- `config()` is plain data that tells two configurations apart.

A new policy is a file with one class that has these two methods; nothing needs to be registered.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hvd_dyncomp.levels import UNCOMPRESSED


class Decision(NamedTuple):
    """The level of the next epoch and, for people, why."""

    bits: int
    reason: str


@dataclass(frozen=True)
class Record:
    """One finished epoch: its number, its metrics averaged over the workers, and what was decided after it.

    `usable` is False where metrics were not finite or the policy failed: policies never see that epoch.
    """

    epoch: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    bits: int = UNCOMPRESSED
    reason: str = ""
    usable: bool = True


class Policy(ABC):
    """See the contract at the top of this module."""

    @abstractmethod
    def decide(self, history: Sequence[Record]) -> Decision:
        """The level of the epoch after the last one in `history`."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The configuration as plain data, the class's name under "policy"."""
