"""What one run compresses, and what it says about it."""

from __future__ import annotations

import os
import sys
import time
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import ddp
from hvd_dyncomp.commands.run.comparison import Comparison
from hvd_dyncomp.commands.run.leaving import leaving
from hvd_dyncomp.commands.run.passes import SECONDS, Meetings, ReducingPasses, await_reduction
from hvd_dyncomp.ddp.model import HOOKED
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.launched import has_process_group, initialized_horovod, rank_by_launcher

ATTEMPTS = 3  # to compress a model, one in each of its first passes
LEAST_BITS = 2  # at fewer, a program's own momentum makes training unstable (docs/levels.md)
LEFT = "a DistributedDataParallel is left as it is: {}"
ITS_OWN = "the program has compressed it, or given it a communication hook"
APART = (
    f"its first {ATTEMPTS} backward passes did not end on all ranks, each within {SECONDS:g} s, as where a rank has no "
    "batch in model.join()"
)
NOTHING = (
    "nothing was compressed: no DistributedDataParallel has trained for more than one step, and no "
    "hvd.DistributedOptimizer has trained"
)
STOPPED = "the comparison is over and has stopped the program"
INTERRUPTED = "the program has ended before the comparison"
AFTERWARDS = (
    "do not use what it has trained or saved, because its steps had different levels. To train, start again with: {}"
)
TIME_ONLY = (
    f"levels below {LEAST_BITS} bits were compared in time only: a run at one of them needs other settings of the "
    "optimizer (docs/levels.md, Slow links)"
)


def say(text: str) -> None:
    """Write a line to stderr."""
    sys.stderr.write(f"hvd_dyncomp: {text}\n")
    sys.stderr.flush()


def speaks() -> bool:
    """Whether this is rank 0, by what connects the ranks, or else by the launcher."""
    horovod = initialized_horovod()
    if horovod is not None:
        return horovod.rank() == 0
    return (dist.get_rank() if has_process_group() else rank_by_launcher()) == 0


class Models:
    """The models that one run of a program compresses.

    Args:
        level: bits per value.
        compared: the levels that are compared; none for no comparison.
        steps: after how many steps a comparison stops the program.
        command: that trains at one level, in words; said at the end of a comparison.
    """

    def __init__(self, level: float, compared: Sequence[float] = (), steps: int = 0, *, command: str = "") -> None:
        self.level, self.compares = level, bool(compared)
        self._compared, self._steps, self._command = compared, steps, command
        # So that no model deletes them, compressed or not: torch does so with Python's lock and waits for a thread of
        # the group's, which may be waiting for the lock to free a tensor of its latest collective.
        self._groups: list[dist.ProcessGroup] = []
        # By model, what is waited for; None where nothing is, any more.
        self._passes: weakref.WeakKeyDictionary[DistributedDataParallel, ReducingPasses | None]
        self._passes = weakref.WeakKeyDictionary()
        self._meetings = Meetings()
        self._meters: list[tuple[Meter, Topology]] = []  # not sessions, which hold parameters
        self._comparisons: list[Comparison] = []
        self._told: set[str] = set()
        self._process = os.getpid()

    def tell(self, text: str) -> None:
        """Have rank 0 say something, once."""
        if text not in self._told and speaks():
            self._told.add(text)
            say(text)

    def on_call(self, model: DistributedDataParallel) -> bool:
        """Note a call of a model with gradients; the model is compressed where the first pass ends that reduces them.

        Not collective: each rank may call its model as it likes.

        Returns:
            Whether further calls are of interest.
        """
        if model not in self._passes:
            self._groups.append(model.process_group)
            alone = model.process_group.size() == 1
            self._passes[model] = None if alone else ReducingPasses(model, self._on_first_passes)
        passes = self._passes[model]
        if passes is None:
            return False
        passes.reduces = model.require_backward_grad_sync
        return True

    def _on_first_passes(self, model: DistributedDataParallel, number: int) -> None:
        """Compress a model, if all ranks are here. If it cannot be compressed, it stays as it is on all ranks.

        Raises:
            TimeoutError, ConnectionError: another rank has ended.
        """
        following, passes = None, self._passes[model]
        try:
            await_reduction(model)
            if self._meetings.all_here(model.process_group):
                with torch.no_grad():
                    following = self._compress(model)
            elif number < ATTEMPTS:
                return
            else:
                self.tell(LEFT.format(APART))
        except (TypeError, ValueError, RuntimeError) as error:  # all ranks have one, and the model is as it was
            self.tell(LEFT.format(ITS_OWN if str(error) == HOOKED else error))
        if passes is not None:
            passes.close()
        self._passes[model] = following

    def _compress(self, model: DistributedDataParallel) -> ReducingPasses | None:
        """Compress a model. Collective. Returns what the comparison waits for, if there is one."""
        if not self.compares:
            self.add(ddp.compress(model, self.level).meter, Topology.of(ddp.transport(model.process_group).hosts()))
            return None
        comparison = self.comparison(ddp.transport(model.process_group))
        self.compare(ddp.compress(model, comparison).meter, comparison)
        return ReducingPasses(model, lambda *_: self.on_step_end(comparison))

    def comparison(self, transport: Transport | None = None) -> Comparison:
        """A controller for a quantizer whose steps are compared; its argument is as in `Controller`."""
        return Comparison(self.level, self._compared, self._steps, transport=transport)

    def add(self, meter: Meter, topology: Topology) -> None:
        """Tell at the end of what a quantizer has sent, from rank 0 of these ranks."""
        self._meters.append((meter, topology))

    def compare(self, meter: Meter, comparison: Comparison) -> None:
        """Tell at the end of a comparison."""
        comparison.meter = meter
        self._comparisons.append(comparison)

    def on_step_end(self, comparison: Comparison) -> None:
        """Note that a step has ended. All ranks come here after the same step.

        Raises:
            SystemExit: with status 0, after the last step that is compared.
        """
        comparison.on_step_end(time.monotonic())
        if any(each.over for each in self._comparisons):
            raise SystemExit(0)

    def report(self) -> None:
        """Say on rank 0 what was saved, or what a comparison has found, even if it was interrupted."""
        if os.getpid() != self._process or not speaks():  # a fork of the program's
            return
        for comparison in self._comparisons:
            if comparison.seconds:
                say(comparison.table())
        if self._comparisons:
            over = any(comparison.over for comparison in self._comparisons)
            say(f"{STOPPED if over else INTERRUPTED}; {AFTERWARDS.format(self._command)}")
            if min(self._compared) < LEAST_BITS:
                say(TIME_ONLY)
        meters = [(meter, topology) for meter, topology in self._meters if meter.records]
        for each in meters:
            say(saved(*each))
        if not (meters or self._comparisons or self._told):
            say(NOTHING)


def saved(meter: Meter, topology: Topology) -> str:
    """A line about what rank 0 has sent, at one or several levels."""
    total = meter.total()
    levels = dict.fromkeys(bits for _, bits in meter.records)
    left = [leaving(meter.level(bits), bits, topology, 0) for bits in levels]
    between = len(topology.hosts) > 1
    mine, plain = map(sum, zip(*left, strict=True)) if between else (total.sent_bytes, total.float32_bytes)
    less = f" ({1 - mine / plain:.1%} less)" if plain else ""
    return (
        f"{total.steps} steps at {', '.join(f'{bits:g}' for bits in levels)} bits: this rank sent {mine / 1e6:.2f} MB"
        f"{' to other hosts' if between else ''} in place of {plain / 1e6:.2f} MB{less}; "
        f"{1000 * total.seconds / total.steps:.2f} ms of a step were in the exchange"
    )
