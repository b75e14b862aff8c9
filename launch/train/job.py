"""The ranks that horovodrun, mpirun or torchrun has started."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from common.errors import RunError
from common.lines import say
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.transport import mpi_settings
from hvd_dyncomp.transport.base import gather_json

_PROGRAM = "train_resnet.py"


class Job:
    """All ranks, connected: by Horovod, or under torchrun by torch's process group. Collective.

    Attributes:
        ddp: whether torchrun has started them, so that they train with `DistributedDataParallel`.

    Raises:
        SystemExit: with status 2 if fewer are connected than a launcher has started.
    """

    def __init__(self) -> None:
        for name, value in mpi_settings.DEFAULTS.items():
            os.environ.setdefault(name, value)
        try:
            ranks.start()
        except ranks.RanksMissing as error:  # there is nobody with whom to agree
            say(f"{_PROGRAM}: error: {error}", sys.stderr)
            raise SystemExit(2) from None
        transport = ranks.transport()
        self.rank, self.size, self.local_rank = transport.rank, transport.size, ranks.local_rank()
        self.ddp = ranks.under_torchrun()
        # Two workers with two threads each on two cores spend more time waiting for each other than computing.
        torch.set_num_threads(min(torch.get_num_threads(), max(1, (os.cpu_count() or 1) // transport.local_size)))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, as JSON, by rank. Collective."""
        return gather_json(ranks.transport(), value, "train.gather")

    def of_rank_0(self, value: Any) -> Any:
        """Rank 0's value. Collective."""
        return self.gather(value if self.rank == 0 else None)[0]

    def mean(self, tensor: Tensor) -> Tensor:
        """The mean of every rank's tensor, on the CPU. Collective."""
        transport = ranks.transport()
        return transport.wait(transport.sum(tensor.cpu(), "train.mean")) / self.size

    @contextmanager
    def together(self) -> Iterator[None]:
        """Something that may fail on one rank only: without this, the others would wait for it. Collective.

        Raises:
            SystemExit: with status 2 on every rank, after rank 0 has printed what was wrong in one line.
        """
        error = None
        try:
            yield
        except (RunError, OSError, ImportError, ValueError) as caught:
            error = _one_line(caught)
        errors = self.gather(error)
        wrong = [(text, rank) for rank, text in enumerate(errors) if text is not None]
        if not wrong:
            return
        if self.rank == 0:
            text, rank = wrong[0]
            say(f"{_PROGRAM}: error: {text}{'' if len(wrong) == self.size else f' (rank {rank})'}", sys.stderr)
        self.gather(None)  # mpirun ends the job with the first rank that exits: the line must be out
        raise SystemExit(2)


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename2 or error.filename}: {error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__
