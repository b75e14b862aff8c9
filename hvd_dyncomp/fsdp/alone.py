"""A process group of this rank alone. FSDP2 sums over it in place of replicas, so that only its hook averages them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist


class Alone(dist.ProcessGroup):
    """A process group of one rank, whose all-reduce leaves values as they are.

    A group that torch makes would need other ranks for that, and over NCCL it may average wrongly: NCCL's average is
    not reliable on one rank.
    """

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stub lacks what its own docstring has
        self._asked = False

    def allreduce(self, *arguments: Any, **options: Any) -> dist.Work:
        """What `dist.all_reduce` calls."""
        self._asked = True
        return _Done()

    def asked(self) -> bool:
        """Whether it was asked for an all-reduce since the last call of this method."""
        asked, self._asked = self._asked, False
        return asked


class _Done(dist.Work):
    """Of a collective that is over."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True
