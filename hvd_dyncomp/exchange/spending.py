"""A budget of bits, spent on the tensors whose gradients it serves best: levels that differ, and change, in step.

Every rank sums up the energy (squared norm) of each tensor's gradients. Now and then all ranks put their sums together;
what each makes of them is the same on all. The greeting of a step asks for that, so that one rank's wish is
everybody's, and has a checksum of the levels, so that ranks that have others hear so before anything is sent. The sums
go out as soon as the greetings are known, whatever the program does: who waits for them at the end of his step may be
waited for by others in another optimizer's. So they are those of the steps before, which nothing changes any more.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hvd_dyncomp.allocation import LOST, allocate, error
from hvd_dyncomp.checks import finite, integer, shown
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.slots import SMALL_BITS, Slot, levels_at
from hvd_dyncomp.levels import UNCOMPRESSED, check_level
from hvd_dyncomp.transport.base import Transport, finish_gather_json, start_gather_json

logger = logging.getLogger(__name__)

# The first energies are put together after so many steps: until then all tensors have the budget's own level.
FIRST = 8
# From then on every so many steps are looked at: a look is a pass over the gradients.
SAMPLED = 8
# Energies are put together again in a new epoch, or after so many steps, whichever comes first.
EVERY = 1000
# An allocation stays as long as its error is within this factor of the best one's, so that levels do not flap.
KEPT = 1.1
# A norm of more counts as one that is not finite: sums of squares are to stay finite.
LARGEST = 1e100


class Spending:
    """Which unit (`buckets.Unit`) of some buckets travels at which level.

    Args:
        buckets: all that an optimizer has.
        rank: of this process; the first one logs.

    Attributes:
        sampling: whether this step's gradients are to be `note`d.
    """

    def __init__(self, buckets: Sequence[Bucket], rank: int) -> None:
        self._buckets, self._rank = buckets, rank
        self._units = [unit for bucket in buckets for unit in bucket.units]
        # What a level is paid for, in values: whole blocks, and those of two units twice.
        self._sizes = [unit.size(bucket.block_size) for bucket in buckets for unit in bucket.units]
        self._large = [index for index, unit in enumerate(self._units) if not unit.small]
        small = sum(size for size, unit in zip(self._sizes, self._units, strict=True) if unit.small)
        self._small_bits = float(SMALL_BITS * small)
        self._values = sum(bucket.blocks * bucket.block_size for bucket in buckets)
        sizes = [(len(bucket.units), bucket.device) for bucket in buckets]
        # On the CPU: they are sent in the middle of backward, which is not to wait for a GPU.
        self._sums = [torch.zeros(size, dtype=torch.float64, device="cpu") for size, _ in sizes]
        # In the step under way.
        self._noted = [torch.zeros(size, dtype=torch.float64, device=device) for size, device in sizes]
        self._energies: list[float] | None = None  # of all ranks; the same on all
        self._kept: dict[float, tuple[float, ...]] = {}  # the levels in use, by budget
        self._settled: set[float] = set()  # budgets for which that has been seen to, since energies are what they are
        self._steps = self._samples = 0  # since energies were put together
        self._epoch = 0
        self.sampling = False

    def levels(self, budget: float) -> dict[str, float]:
        """Bits a value by the name of a unit's first parameter."""
        found = self._levels(budget) or levels_at(budget, self._units)
        return {unit.name: bits for unit, bits in zip(self._units, found, strict=True)}

    def begin_step(self, budget: float, epoch: int) -> bool:
        """Sets the level of every unit for a step; returns whether energies should be put together in it.

        Args:
            budget: mean bits a value; 32 for none.
            epoch: that the step belongs to.
        """
        compressed = budget != UNCOMPRESSED
        self._settle(budget)
        found = iter(self._levels(budget) or ())
        for bucket in self._buckets:
            bucket.levels = tuple(bits for _, bits in zip(bucket.units, found, strict=False)) or None
        self.sampling = compressed and (self._steps < FIRST or self._steps % SAMPLED == 0)
        self._steps += compressed
        if self.sampling:
            for noted in self._noted:  # of a step that was given up
                noted.zero_()
        due = self._steps >= FIRST if self._energies is None else epoch != self._epoch or self._steps >= EVERY
        return due and self._samples > 0

    def note(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Adds a gradient's energy to its unit's. Waits for no device."""
        bucket = self._buckets[slot.bucket]
        dtype = torch.promote_types(gradient.dtype, torch.float32)  # it cannot be less than the gradient's
        with bucket.streams.outgoing([bucket.streams.origin()]):
            norm = torch.linalg.vector_norm(gradient.detach(), dtype=dtype).double()
            energy = torch.where(norm < LARGEST, norm, 0.0).square()
            self._noted[slot.bucket][bucket.unit_of(slot)] += energy

    def end_step(self, valid: bool) -> None:
        """Adds what was noted in a step that is over.

        Args:
            valid: whether all its gradients were new, and finite. Of others none counts: a gradient scaler, whose steps
                before it has found its scale are those of largest energies, would seem to weaken what overflows first.
        """
        if not (self.sampling and valid):
            return
        self._samples += 1
        for sums, noted in zip(self._sums, self._noted, strict=True):
            sums += noted.to("cpu")

    def start(self, transport: Transport, name: str) -> Any:
        """All ranks tell each other the energies of the steps before this one. Returns a handle for `finish`.

        Args:
            transport: among the optimizer's ranks.
            name: of the collective.
        """
        return start_gather_json(transport, self._own(), name)

    def finish(self, transport: Transport, handle: Any, epoch: int) -> int:
        """Blocks until all energies are known, by which levels are chosen from the next step on.

        Returns how many bytes this rank has told each other one.

        Args:
            transport, handle: those of `start`.
            epoch: that the step belongs to.
        """
        everyone = finish_gather_json(transport, handle)
        self._energies = [sum(sums) for sums in zip(*everyone, strict=True)]
        self._epoch = epoch
        self._settled.clear()
        self._steps = self._samples = 0
        nbytes = len(json.dumps(self._own())) + 1
        for sums in self._sums:
            sums.zero_()
        return nbytes

    def _levels(self, budget: float) -> tuple[float, ...] | None:
        """Of all units; None for the budget's own (`slots.levels_at`)."""
        if budget > max(LOST):  # no level that there is would lose enough less
            return None
        if budget in self._settled:
            return self._kept[budget]
        return self._chosen(budget) if any(self._energies or ()) else None

    def _chosen(self, budget: float) -> tuple[float, ...]:
        """By the energies that there are: those in use, as long as they are good enough."""
        kept = self._kept.get(budget)
        energies = self._of_large(self._energies or ())
        sizes = [self._sizes[index] for index in self._large]
        mean = (budget * self._values - self._small_bits) / max(1, sum(sizes))
        best = iter(allocate(sizes, energies, mean))
        found = tuple(SMALL_BITS if unit.small else next(best) for unit in self._units)
        if kept is None or error(energies, self._of_large(kept)) > KEPT * error(energies, self._of_large(found)):
            return found
        return kept

    def _of_large(self, values: Sequence[float]) -> list[float]:
        return [values[index] for index in self._large]

    def _settle(self, budget: float) -> None:
        """Keeps what `_levels` says. In steps only, which all ranks have: what is kept decides about what follows."""
        if budget > max(LOST) or budget in self._settled or not any(self._energies or ()):
            return
        chosen = self._chosen(budget)
        if chosen != self._kept.get(budget):
            self._say(budget, chosen)
        self._kept[budget] = chosen
        self._settled.add(budget)

    def _say(self, budget: float, levels: tuple[float, ...]) -> None:
        if self._rank:
            return
        for bits in sorted(set(levels)):
            names = [unit.name for unit, own in zip(self._units, levels, strict=True) if own == bits]
            size = sum(size for size, own in zip(self._sizes, levels, strict=True) if own == bits)
            share = f"{size / sum(self._sizes):.1%} of all values"
            logger.info("a budget of %s bits: %s, %s, at %s bits", budget, ", ".join(names), share, bits)

    def _own(self) -> list[float]:
        """This rank's sums."""
        return torch.cat(self._sums).tolist() if self._sums else []

    def state_dict(self) -> dict[str, Any]:
        """Plain data. All but "sums" is the same on all ranks."""
        return {
            "units": [[unit.name, unit.numel] for unit in self._units],
            "sums": self._own(),
            "energies": self._energies,
            "kept": [[bits, list(levels)] for bits, levels in self._kept.items()],
            "settled": sorted(self._settled),
            "steps": self._steps,
            "samples": self._samples,
            "epoch": self._epoch,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` returned, if it was of the same units; begins anew if it was of others."""
        if state["units"] != [[unit.name, unit.numel] for unit in self._units]:
            logger.warning("the tensors or their buckets changed: levels are allocated anew")
            return
        sizes = [len(sums) for sums in self._sums]
        values = torch.tensor(state["sums"], dtype=torch.float64, device="cpu")
        for sums, part in zip(self._sums, values.split(sizes), strict=True):
            sums.copy_(part)
        self._energies = state["energies"]
        self._kept = {bits: tuple(levels) for bits, levels in state["kept"]}
        self._settled = set(state["settled"])
        self._steps, self._samples, self._epoch = state["steps"], state["samples"], state["epoch"]


def checked(state: Any) -> Mapping[str, Any] | None:
    """What `Spending.load_state_dict` takes, or None.

    Raises:
        KeyError, TypeError, ValueError: it is something else.
    """
    if state is None:
        return None
    units = len([(str(name), integer("numel", numel, 1)) for name, numel in state["units"]])
    lists = [state["sums"], *([] if state["energies"] is None else [state["energies"]])]
    for energies in lists:
        if len([finite("energies", energy, 0) for energy in energies]) != units:
            raise ValueError(f"energies must be {units}, got {shown(energies)}")
    for bits, levels in state["kept"]:
        check_level("bits", bits)
        if [bits for bits in levels if bits in LOST] != list(levels) or len(levels) != units:
            raise ValueError(f"levels must be {units} of {tuple(LOST)}, got {shown(levels)}")
    if not set(state["settled"]) <= {bits for bits, _ in state["kept"]}:
        raise ValueError(f"settled must be among the budgets, got {shown(state['settled'])}")
    for name in ("steps", "samples", "epoch"):
        integer(name, state[name], 0)
    return state
