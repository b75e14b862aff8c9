"""Ranks that wait for each other in different collectives, such as one in a step and one in `Controller.step`.

Neither would ever go on. A rank that has waited long notes in the job's store what it waits for, and what it has
started, and looks for such a note of each rank that it waits for.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

import torch.distributed as dist


class Wait(NamedTuple):
    """What a rank waits for.

    Attributes:
        name: of the collective.
        group, number: whose collective it is, and which of those that its ranks start in one order.
        ranks: that take part, by their numbers in the job.
        started: by group, how many of its collectives this rank has started.
        alone: whether nothing else is in flight on this rank that could go on meanwhile.
        turn: tells two waits of a rank apart.
    """

    name: str
    group: str
    number: int
    ranks: list[int]
    started: dict[str, int]
    alone: bool
    turn: int

    def needs(self, rank: int, theirs: Wait) -> bool:
        """Whether it cannot end before a rank starts the collective, which it has not, and what that one waits for."""
        return self.alone and rank in self.ranks and theirs.started.get(self.group, 0) < self.number


# What the job's store raises when it has ended with its rank, or the program has left it.
_NO_STORE = (RuntimeError, ValueError)


class Watch:
    """Looks, in one long wait, for a rank that waits for this one. It finds none where the job's store is gone.

    Args:
        wait: of this rank.
        rank: this one's number in the job.
    """

    def __init__(self, wait: Wait, rank: int) -> None:
        self._wait, self._rank, self._seen = wait, rank, dict[int, int]()
        self._note(json.dumps(wait))

    def crossed(self) -> str:
        """Which rank waits for this one, and for what, in words; "" if none is known to.

        Call it now and then: it says so only if two calls in succession have found the same two waits, here or there.
        """
        try:
            return self._crossed(_store())
        except _NO_STORE:
            return ""

    def end(self) -> None:
        """The wait is over."""
        self._note("")

    def _note(self, text: str) -> None:
        with contextlib.suppress(*_NO_STORE):
            _store().set(str(self._rank), text)

    def _crossed(self, store: Any) -> str:
        mine = f"{self._rank}.{self._wait.turn}"
        if store.check([mine]):
            return store.get(mine).decode()
        before, self._seen = self._seen, {}
        for rank in self._wait.ranks:
            theirs = _wait_of(store, rank) if rank != self._rank else None
            if theirs is not None and self._wait.needs(rank, theirs) and theirs.needs(self._rank, self._wait):
                self._seen[rank] = theirs.turn
                if before.get(rank) == theirs.turn:
                    said = (
                        f"rank {self._rank} waits for {self._wait.name}, and rank {rank} for {theirs.name}, so neither "
                        "goes on: every rank must make the same calls in one order"
                    )
                    store.set(f"{rank}.{theirs.turn}", said)
                    return said
        return ""


def _store() -> Any:
    return dist.PrefixStore("hvd_dyncomp.waits", dist.distributed_c10d._get_default_store())


def _wait_of(store: Any, rank: int) -> Wait | None:
    """What a rank notes that it waits for."""
    said = store.get(str(rank)).decode() if store.check([str(rank)]) else ""
    return Wait(*json.loads(said)) if said else None
