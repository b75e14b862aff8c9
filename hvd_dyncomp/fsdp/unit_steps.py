"""One backward pass of a sharded model: a step of its own for each unit whose gradients come, in their order."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from typing import Any

import torch

from hvd_dyncomp import replicas
from hvd_dyncomp.exchange.handshake import refuse
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import StepConfig
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.fsdp.layout import Unit
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter


class UnitSteps:
    """The steps of one backward pass. They have one number and one level, and send in the order of their beginnings.

    The ranks agree on each unit, before anything of it is sent: a replica that goes through other modules, or in
    another order, is an error in words.

    Args:
        plan: the buckets.
        config: of all its steps.
        meter: as in `Step`.
        unchecked: parameters whose values replicas have not compared yet, by name. They are taken out.
        to_agree_on: as in `Step`, for each of these.
        values: as in `Step`, for the first of these.

    Attributes:
        number, bits: of the config.
    """

    def __init__(
        self,
        plan: Plan,
        config: StepConfig,
        *,
        meter: Meter,
        unchecked: dict[str, torch.Tensor],
        to_agree_on: Mapping[str, Any],
        values: Mapping[str, int] | None,
    ) -> None:
        self._plan, self._config = plan, config
        self._source: Any = plan.source  # which is `ShardGradients`
        self._meter = meter
        self._unchecked, self._to_agree_on, self._values = unchecked, to_agree_on, values
        self.number, self.bits = config.number, config.bits
        self._steps: list[Step] = []
        self._in_flight: dict[Unit, tuple[Step, dict[str, torch.Tensor]]] = {}  # without means yet

    def start(self) -> None:
        """As in `Step`; nothing is sent before there is a gradient."""

    def on_unit(self, unit: Unit, flat: torch.Tensor, *, sums: bool, ends: bool) -> None:
        """Take what FSDP wants averaged. Its values are means when this returns, or after `collect`.

        Args:
            sums: whether they are to be sums instead.
            ends: whether `collect` will be called where autograd's backward pass ends.

        Raises:
            LockstepError: as in `Step.collect`.
        """
        began = time.perf_counter()
        if unit in self._in_flight:  # used twice by the loss: FSDP adds to what is not a mean yet
            self.collect()
        source = self._source
        try:
            fits = source.fits(unit, flat)
            gradients = unit.gradients(flat, fits=fits)
            stays = fits and ends and not sums and unit.stays(flat, source.by_name)
        except Exception as error:
            refuse(source.transport, source.label, error, number=self.number, bits=self.bits)
            raise
        step = self._begin(unit, flat, gradients, sums=sums)
        self._in_flight[unit] = step, gradients if stays else {}
        slots = self._plan.slots if step.bits != UNCOMPRESSED else {}
        step.reduce(unit.name, {name: gradients[name] for name in gradients if name not in slots})
        for name in reversed(list(gradients)):
            if name in slots:
                step.add(slots[name], gradients[name])
        step.traffic.seconds += time.perf_counter() - began
        if not stays:
            self.collect()
        if sums:
            flat.mul_(source.world_size)

    def _begin(self, unit: Unit, flat: torch.Tensor, gradients: Collection[str], *, sums: bool) -> Step:
        to_agree_on: dict[str, Any] = {
            **self._to_agree_on,
            "frozen parameters": unit.frozen(self._source.by_name),
            "module": unit.name,
            "number of gradients": flat.numel(),
            "operation": "SUM" if sums else "AVG",
            "type of gradients": str(flat.dtype),
        }
        named = list(self._unchecked.items())
        to_agree_on |= {f"values of {name}, as a checksum,": one for name, one in replicas.numbers(named).items()}
        self._unchecked.clear()
        buckets = self._plan.parts.get(unit.name, [])
        step = Step(
            self._plan,
            config=self._config.with_residuals(any(bucket.residuals.carries for bucket in buckets)),
            meter=self._meter,
            absent=unit.shapes.keys() - gradients,
            to_agree_on=to_agree_on,
            values=None if self._steps else self._values,
            buckets=buckets,
            after=self._steps[-1] if self._steps else None,
        )
        self._steps.append(step)
        step.start()
        return step

    def collect(self) -> None:
        """Block until all that was taken is a mean.

        Raises:
            LockstepError: the ranks differ in level, step, module or parameters, or one has given up.
            RuntimeError: a gradient is no longer where the hook got it.
        """
        for unit, (step, gradients) in list(self._in_flight.items()):
            began = time.perf_counter()
            step.collect()
            unit.check_place(gradients, self._source.by_name)
            del self._in_flight[unit]
            step.traffic.seconds += time.perf_counter() - began

    @property
    def refused(self) -> bool:
        """As in `Step`."""
        return any(step.refused for step in self._steps)

    def abandon(self) -> None:
        """As in `Step`."""
        for step in self._steps:
            step.abandon()
