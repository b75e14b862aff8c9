"""The source of gradients: this rank's shards, which replicas average."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.fsdp.layout import Unit, local
from hvd_dyncomp.transport.base import Transport


class ShardGradients(Source):
    """The gradients of one model's units, or of all units of a group of replicas.

    What it reduces is known once a backward pass has brought it: `named` then has this rank's shards.

    Args:
        among: connects the replicas.
        label: as in `Source`.
        place: number of this group of replicas among those of the job, and how many there are.
        parameters: of the model, by name; none if nobody knows them.
        device: of the gradients; None: the first one shows it.

    Attributes:
        place, device: see above.
        by_name: the parameters.
        units: by name, in the order in which they have come first.
    """

    own_memory = True  # what a group gets is FSDP's

    def __init__(
        self,
        among: Transport,
        label: str,
        place: tuple[int, int],
        parameters: Mapping[str, torch.Tensor],
        device: torch.device | None,
    ) -> None:
        super().__init__(among)
        self.label, self.place, self.by_name, self.device = label, place, parameters, device
        self.units: dict[str, Unit] = {}
        self._new: dict[str, torch.Tensor] = {}  # tensors of units whose layout is not known, of this pass
        self._name()

    def unit(self, name: str, own: Mapping[str, torch.Tensor], flat: torch.Tensor) -> Unit:
        """The unit that has brought a tensor."""
        if self.device is None:
            self.device = flat.device
            self._name()
        return self.units.setdefault(name, Unit(name, own))

    def fits(self, unit: Unit, flat: torch.Tensor) -> bool:
        """Whether a unit's layout is that of a tensor. If it is not, `learn` will look."""
        fits = unit.fits(flat, self.by_name)
        if not fits:
            self._new[unit.name] = flat
        return fits

    def learn(self) -> bool:
        """Look, after a pass, where gradients lie; return whether anything is new."""
        for name, flat in self._new.items():
            self.units[name].learn(flat, self.by_name)
        changed = bool(self._new)
        self._new = {}
        self._name()
        return changed

    def forget(self) -> None:
        """Look at nothing of the present pass."""
        self._new = {}

    def _name(self) -> None:
        self.parts = {name: unit.name for unit in self.units.values() for name in unit.shapes}
        self.named = [
            (name, torch.empty((), dtype=unit.dtype, device=self.device).expand(shape))
            for unit in self.units.values()
            for name, shape in unit.shapes.items()
        ]

    def state_dict(self) -> dict[str, Any]:
        """The layouts of all units, as plain data."""
        return {name: unit.state_dict() for name, unit in self.units.items()}

    def units_in(self, state: Mapping[str, Any], own: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, Unit]:
        """The units of a state. `own`: of each unit, its module's parameters.

        Raises:
            ValueError: they are another model's; or what `Unit.load_state_dict` does.
        """
        units = {name: Unit(name, own.get(name, {})) for name in state}
        for name, unit in units.items():
            unit.load_state_dict(state[name])
            others = [each for each, shape in unit.shapes.items() if shape != self._shape_of(each, shape)]
            if own and (name not in own or others):
                raise ValueError(f"this model has no unit {name} with {' and '.join(others) or 'these parameters'}")
        return units

    def _shape_of(self, name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Of this rank's shard of a parameter."""
        return tuple(local(self.by_name[name]).shape) if name in self.by_name else default

    def load(self, units: dict[str, Unit]) -> None:
        """Take over what `units_in` returned."""
        self.units = units
        self.forget()
        self._name()

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, parameter) for name, parameter in self.by_name.items() if parameter.requires_grad]

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        whole = [
            (name, each)
            for unit in self.units.values()
            for name in unit.shapes.keys() - self.by_name.keys()
            for each in unit.own.values()
        ]
        return [*self.by_name.items(), *whole]
