"""Detects ranks that wait for each other in different collectives, such as a step and `Controller.step`.

Neither wait would ever end. A rank that has waited long notes in the job's store which collective it waits for, and
which ones it has started, and reads the notes of the ranks that it waits for.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any, NamedTuple

import torch.distributed as dist


class Wait(NamedTuple):
    """The note of a rank that waits.

    Attributes:
        name: of the collective.
        group, number: the group of the collective, and its number in the order in which the group's ranks start them.
        ranks: the ranks that take part, as ranks of the job.
        started: by group, how many collectives this rank has started.
        alone: whether no other collective is in flight on this rank.
        turn: distinguishes the waits of a rank.
    """

    name: str
    group: str
    number: int
    ranks: list[int]
    started: dict[str, int]
    alone: bool
    turn: int

    def needs(self, rank: int, theirs: Wait) -> bool:
        """Whether this wait cannot end before `rank`, which waits as noted in `theirs`, has started the collective."""
        return self.alone and rank in self.ranks and theirs.started.get(self.group, 0) < self.number


# The errors of the job's store if its rank has ended, or the program has destroyed its group.
_NO_STORE = (RuntimeError, ValueError)


class Watch:
    """Looks, during one long wait, for a rank that waits for this one. Without the job's store it finds none.

    Args:
        wait: of this rank.
        rank: this one's number in the job.
    """

    def __init__(self, wait: Wait, rank: int) -> None:
        self._wait, self._rank, self._seen = wait, rank, dict[int, int]()
        self._note(json.dumps(wait))

    def crossed(self) -> str:
        """A text that names the two ranks and their collectives; "" if no rank is known to wait for this one.

        Call it repeatedly: it reports only what two consecutive calls on either rank have found.
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
                        f"rank {self._rank} waits for {self._wait.name}, and rank {rank} waits for {theirs.name}, so "
                        "neither can continue: every rank must make the same calls in the same order"
                    )
                    store.set(f"{rank}.{theirs.turn}", said)
                    return said
        return ""


def _store() -> Any:
    return dist.PrefixStore("hvd_dyncomp.waits", dist.distributed_c10d._get_default_store())


def _wait_of(store: Any, rank: int) -> Wait | None:
    """The note of a rank, if it waits."""
    said = store.get(str(rank)).decode() if store.check([str(rank)]) else ""
    return Wait(*json.loads(said)) if said else None
