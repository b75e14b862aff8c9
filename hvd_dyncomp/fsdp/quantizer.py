"""The quantizer of a sharded model, and the hook by which FSDP2 hands it gradients."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from hvd_dyncomp.autograd import call_at_end
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.errors import InFlight, LockstepError
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import StepConfig
from hvd_dyncomp.fsdp.shards import ShardGradients, replica_group
from hvd_dyncomp.fsdp.unit_steps import UnitSteps
from hvd_dyncomp.fsdp.units import Unit, units_of
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.agreement import description, on_all_ranks
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.base import Transport, gather_json
from hvd_dyncomp.transport.torch_distributed import transport

WAITING = (
    "{} must be called between steps, but {} holds accumulated gradients that are not averaged yet and that a state "
    "does not contain: call it after a backward pass with set_requires_gradient_sync(True) and "
    "set_requires_all_reduce(True), which averages them"
)


class Quantizer(Session):
    """The quantizer that `compress` returns.

    Attributes:
        controller: decides the level.
        bits: level of the next step: that of the controller or of the warm-up.
        meter: the `Meter` of the bytes that this rank has sent to other replicas.

    `loss.backward()` raises, on all ranks of a group of replicas:

    - `LockstepError`: the ranks differ in parameters, settings, level, step or modules.
    - `ConnectionError`: another rank has ended.
    - `TimeoutError`: another rank does not answer in time.
    - `RuntimeError`: an error has ended an earlier step.
    """

    called, made_by = "a quantizer of hvd_dyncomp.fsdp", "fsdp.compress"

    def __init__(
        self,
        model: torch.nn.Module,
        controller: Controller | Policy | float | None,
        replicas: Any,
        **arguments: Any,
    ) -> None:
        everyone = transport()
        label = everyone.new_label("fsdp")  # also of calls that fail: it must be the same on all ranks
        with on_all_ranks(everyone):
            group = self._prepare(model, controller, replicas, everyone, **arguments)
        among = transport(group)
        with on_all_ranks(everyone):
            self._source = ShardGradients(self._units, among, dist.get_process_group_ranks(group), label)
            self._plan = self._new_plan(among.hosts())
        with on_all_ranks(everyone):
            _check_places(among, self._source.place)
            with on_all_ranks(among) as mine:
                mine += description(self._source.named, values=False)
        self._connect(among)
        for unit in self._units:
            unit.average_by(functools.partial(self._on_unit, unit))

    def _prepare(
        self,
        model: torch.nn.Module,
        controller: Controller | Policy | float | None,
        replicas: Any,
        everyone: Transport,
        **arguments: Any,
    ) -> Any:
        """Check the arguments, and leave the model as it is. Returns the group of replicas.

        Raises:
            TypeError, ValueError: an argument has a wrong type or value, or the model cannot be compressed.
        """
        self._units = units_of(model)
        group = replica_group(replicas, self._units)
        super().__init__(controller, everyone, **arguments)
        self._unchecked = set(self._units)
        self._error: BaseException | None = None  # that backward has not raised yet
        return group

    @property
    def _waiting(self) -> bool:
        return False  # each unit's step sees to its own

    def _new_step(self, plan: Plan, config: StepConfig, **arguments: Any) -> Any:
        values = arguments["values"]
        return UnitSteps(plan, config, meter=self.meter, unchecked=self._unchecked, values=values)

    @property
    def everyone(self) -> Transport:
        return self._transport

    @property
    def shard(self) -> list[int] | None:
        return list(self._source.place)

    def state_dict(self) -> dict[str, Any]:
        """As `Session.state_dict`, of this rank's shards: save one per rank of the whole job.

        Raises:
            RuntimeError: also if gradients of earlier backward passes wait to be averaged.
        """
        return {**super().state_dict(), "shard": list(self._source.place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Session.load_state_dict`.

        Raises:
            ValueError: also if it is of other shards; nothing has changed.
            RuntimeError: also if gradients of earlier backward passes wait to be averaged; nothing has changed.
        """
        if isinstance(state, Mapping) and state.get("shard") not in (None, list(self._source.place)):
            raise ValueError(
                f"state was saved for shard {state['shard']} ([index, number of shards]), but this rank has shard "
                f"{list(self._source.place)}: save and load one state_dict per rank"
            )
        super().load_state_dict(state)
        self._unchecked = set(self._units)

    def _check_between_steps(self, what: str) -> None:
        super()._check_between_steps(what)
        for unit in self._units:
            if unit.waits:
                raise InFlight(WAITING.format(what, unit.name))

    @torch.no_grad()
    def _on_unit(self, unit: Unit, flat: torch.Tensor) -> None:
        """The hook. What is raised in it is raised where backward ends: FSDP could not go on otherwise."""
        ends = False
        try:
            ends = call_at_end(self._at_end)  # in each: a backward pass that has raised has called none
            if self._error is None:
                step: Any = self._step or self._begin()
                step.on_unit(unit, flat, ends=ends)
                if unit.hooked:  # optimizers may step next
                    self._note_exchange(step.bits)
        except BaseException as error:  # noqa: BLE001
            self._break(error)
        if not ends:  # no backward pass of autograd's: a schedule of pipelines calls FSDP by itself
            self._at_end()

    def _break(self, error: BaseException) -> None:
        """End the step, because of an error."""
        self._fail(error)
        self._error = self._error or error

    @torch.no_grad()
    def _at_end(self) -> None:
        """End the step; have raised what has happened in it. Called once for each hook, and after FSDP's own end."""
        while self._step is not None:
            try:
                self._end(self._step)
            except BaseException as error:  # noqa: BLE001  # raised below
                self._break(error)
        if self._error is not None and not call_at_end(self._raise):
            self._raise()

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _check_places(among: Transport, place: tuple[int, int]) -> None:
    """Raises: LockstepError: replicas would average different shards. On all of them."""
    everyone = gather_json(among, list(place), "hvd_dyncomp.fsdp.places")
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            one, other = (f"shard {number} of {count}" for number, count in (everyone[0], theirs))
            raise LockstepError(
                f"replicas must connect ranks with the same shard, but its rank 0 has {one}, its rank {rank} {other}"
            )
