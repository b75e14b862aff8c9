"""What one run compresses, and what it says about it."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Sequence

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import ddp
from hvd_dyncomp.commands.run.comparison import Comparison
from hvd_dyncomp.ddp.model import HOOKED
from hvd_dyncomp.meter import Meter, Traffic
from hvd_dyncomp.session import Session
from hvd_dyncomp.transport.launched import has_process_group, initialized_horovod, rank_by_launcher

LEFT = "a DistributedDataParallel is left as it is: {}"
ITS_OWN = "the program has compressed it, or given it a communication hook"
NOTHING = "nothing was compressed: no DistributedDataParallel and no hvd.DistributedOptimizer has trained"


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"hvd_dyncomp: {text}\n")
    sys.stderr.flush()


def _speaks() -> bool:
    """Whether this is rank 0, by what connects the ranks, or else by the launcher."""
    horovod = initialized_horovod()
    if horovod is not None:
        return horovod.rank() == 0
    return (dist.get_rank() if has_process_group() else rank_by_launcher()) == 0


class Models:
    """The models that one run of a program compresses.

    Args:
        level: bits per value.
        compared: the levels that the first steps compare; none for no comparison.
        steps: how many steps compare.
        stops: whether the program ends after them.
    """

    def __init__(self, level: float, compared: Sequence[float] = (), steps: int = 0, *, stops: bool = False) -> None:
        self.level, self.stops = level, stops
        self._compared, self._steps = compared, steps
        # So that no model deletes them, within C++ and with Python's lock: it would wait for a thread of the group's,
        # and that may be waiting for the lock.
        self._groups: list[dist.ProcessGroup] = []
        self._met: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self._meters: list[Meter] = []  # not sessions, which hold parameters
        self._comparisons: list[Comparison] = []
        self._told: set[str] = set()
        self._process = os.getpid()

    @property
    def stopped(self) -> bool:
        """Whether the program shall end now. It is so on all ranks after the same step."""
        return self.stops and any(comparison.over for comparison in self._comparisons)

    def tell(self, text: str) -> None:
        """Have rank 0 say something, once."""
        if text not in self._told and _speaks():
            self._told.add(text)
            say(text)

    def compress(self, model: DistributedDataParallel) -> None:
        """Compress a model, unless it was tried before. Collective. If it cannot be, it is left as it is on all ranks.

        Raises:
            TimeoutError, ConnectionError: another rank does not come here in time, or has ended.
        """
        if model in self._met:
            return
        self._met.add(model)
        self._groups.append(model.process_group)
        try:
            self.add(ddp.compress(model, self.level))
        except (TypeError, ValueError, RuntimeError) as error:  # all ranks have one, and the model is as it was
            self.tell(LEFT.format(ITS_OWN if str(error) == HOOKED else error))

    def add(self, session: Session) -> None:
        """Tell of a session at the end. If levels are compared, its first steps take part."""
        self._meters.append(session.meter)
        if self._compared and session.everyone.size > 1:
            self._comparisons.append(Comparison(self._compared, self._steps, say))
            session._follow(self._comparisons[-1])

    def report(self) -> None:
        """Say on rank 0 what was saved, and what a comparison has found that was interrupted."""
        if os.getpid() != self._process or not _speaks():  # a fork of the program's
            return
        for comparison in self._comparisons:
            if not comparison.over and comparison.seconds:
                say(comparison.table())
        for meter in [one for one in self._meters if one.records]:
            levels = ", ".join(f"{bits:g}" for bits in dict.fromkeys(bits for _, bits in meter.records))
            say(saved(meter.total(), levels))
        if not self._told and not any(meter.records for meter in self._meters):
            say(NOTHING)


def saved(sent: Traffic, levels: str) -> str:
    """A line about what a rank has sent, at one or several levels."""
    between = sent.float32_leaving_bytes > 0
    mine, plain = (sent.leaving_bytes, sent.float32_leaving_bytes) if between else (sent.sent_bytes, sent.float32_bytes)
    return (
        f"{sent.steps} steps at {levels} bits: this rank sent {mine / 1e6:.2f} MB{' to other hosts' if between else ''}"
        f" in place of {plain / 1e6:.2f} MB ({sent.saved_fraction:.1%} less); "
        f"{1000 * sent.seconds / sent.steps:.2f} ms of a step were in the exchange"
    )
