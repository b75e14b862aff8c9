"""The quantizer of sharded models: it takes what FSDP wants averaged over replicas, unit by unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Unpack

import torch
import torch.distributed as dist

from hvd_dyncomp.autograd import call_at_end, check_engine, computes
from hvd_dyncomp.checks import comes_from
from hvd_dyncomp.controller import Controller, controller_from
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import StepConfig
from hvd_dyncomp.fsdp.source import ShardGradients
from hvd_dyncomp.fsdp.unit_steps import UnitSteps
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.agreement import description, on_all_ranks
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.torch_names import check_names
from hvd_dyncomp.transport.alone import Alone
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.torch_distributed import transport

Own = Mapping[str, Mapping[str, torch.Tensor]]  # by unit's name, its parameters by name


class Quantizer(Session):
    """The quantizer that `attach` returns, or `mesh.get_group("replicate").quantizer` for models without it.

    Attributes:
        controller: decides the level.
        bits: level of the next step, as in `DynamicQuantizer`.
        meter: the `Meter` of the bytes that this rank has sent to other replicas.

    `loss.backward()` raises, on all ranks of a group of replicas:

    - `LockstepError`: the ranks differ in parameters, settings, level, step or modules.
    - `ConnectionError`: another rank has ended.
    - `TimeoutError`: another rank does not answer in time.
    - `RuntimeError`: an error has ended an earlier step.
    """

    called, made_by = "a quantizer of hvd_dyncomp.fsdp", "hvd_dyncomp.fsdp"

    def __init__(self, controller: Controller | Policy | float | None, **options: Unpack[Options]) -> None:
        check_engine()
        check_names(torch.Tensor, ("_post_accumulate_grad_hooks",))
        # Whose ranks are those of the job; this one's own are known by `connect`.
        controller = controller_from(self.default_controller if controller is None else controller, None)
        super().__init__(controller, Alone(), **options)
        self._own: Own = {}
        self._calls: Counter[int] = Counter()  # of this pass, by number of values
        self._error: BaseException | None = None  # that backward has not raised yet

    def connect(
        self, group: Any, label: str, everyone: Transport, own: Own, device: torch.device | None = None
    ) -> None:
        """Connect the replicas. Collective among them; blocks.

        Args:
            group: theirs.
            label: as in `Source`.
            everyone: connects the ranks of the job.
            own: of the units of a model; empty if nobody knows them.
            device: as in `ShardGradients`.

        Raises:
            LockstepError: the replicas have different models.
        """
        self._transport, self._everyone, self._own = transport(group), everyone, own
        ranks = dist.get_process_group_ranks(group)
        place = ranks[0], everyone.size // len(ranks)
        parameters = {name: each for unit in own.values() for name, each in unit.items()}
        self._source = ShardGradients(self._transport, label, place, parameters, device)
        with on_all_ranks(self._transport) as mine:
            self._plan = self._new_plan(self._transport.hosts())
            mine += description(list(parameters.items()), values=False)
        self._unchecked = dict(parameters)
        self._connect(self._transport)

    def _plan_of_step(self) -> Plan:
        if self._saved is not None:
            state, self._saved = self._saved, None
            self._restore(state)
        return super()._plan_of_step()

    @property
    def _waiting(self) -> bool:
        return False  # each unit's step sees to its own

    def _new_step(self, plan: Plan, config: StepConfig, *, values: Mapping[str, int] | None, **arguments: Any) -> Any:
        agreed = self._to_agree_on()
        return UnitSteps(plan, config, meter=self.meter, unchecked=self._unchecked, to_agree_on=agreed, values=values)

    @property
    def failed(self) -> bool:
        """Whether an error has ended a step, and no further one begins."""
        return bool(self._failure)

    @property
    def everyone(self) -> Transport:
        return self._everyone

    @property
    def shard(self) -> list[int] | None:
        return list(self._source.place)

    def state_dict(self) -> dict[str, Any]:
        """As `Session.state_dict`, of this rank's shards: save one per rank of the whole job."""
        return {**super().state_dict(), "shard": list(self._source.place), "units": self._source.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Session.load_state_dict`.

        Raises:
            ValueError: also if it is of other shards; nothing has changed.
        """
        self._check_between_steps("load_state_dict")
        if isinstance(state, Mapping) and state.get("shard") not in (None, list(self._source.place)):
            raise ValueError(
                f"state was saved for shard {state['shard']} ([index, number of shards]), but this rank has shard "
                f"{list(self._source.place)}: save and load one state_dict per rank"
            )
        super().load_state_dict(state)
        self._unchecked.update(self._source.by_name)

    def _residuals(self) -> Mapping[str, Any]:
        return super()._residuals() if self._saved is None else self._saved

    def _restore(self, state: Mapping[str, Any]) -> None:
        with comes_from("state_dict()", state):
            units = self._source.units_in(state["units"], self._own) if "units" in state else self._source.units
            own = {name: shape for unit in units.values() for name, shape in unit.shapes.items()}
            for name, each in state["residuals"].items():
                if tuple(each.shape) != own[name]:
                    raise ValueError(f"the residual of {name} has shape {tuple(each.shape)} and not {own[name]}")
        residual_state.check([], state, self._source.rank, self._source.world_size)
        if self._source.device is None:
            self._saved = state
            return
        before = self._source.units
        self._source.load(units)
        try:
            plan = self._new_plan(self._transport.hosts())
            plan.restore(state)
        except BaseException:
            self._source.load(before)
            raise
        self._plan, self._saved = plan, None

    def on_call(self, flat: torch.Tensor, *, sums: bool) -> None:
        """Take what FSDP wants averaged, of a model that nobody knows: units are matched by order and size."""
        numel = flat.numel()
        self._calls[numel] += 1
        self.on_unit(f"all_reduce {self._calls[numel]} of {numel} values", flat, sums=sums)

    @torch.no_grad()
    def on_unit(self, name: str, flat: torch.Tensor, *, sums: bool) -> None:
        """Take what FSDP wants averaged, or summed. Errors are raised where backward ends: FSDP could not go on."""
        ends = False
        try:
            ends = call_at_end(self._at_end)  # in each: a backward pass that has raised has called none
            if self._error is None:
                unit = self._source.unit(name, self._own.get(name, {}), flat)
                step: Any = self._step or self._begin()
                step.on_unit(unit, flat, sums=sums, ends=ends)
                if any(each._post_accumulate_grad_hooks for each in unit.own.values()):  # type: ignore[attr-defined]
                    self._note_exchange(step.bits)  # optimizers may step next
        except BaseException as error:  # noqa: BLE001
            self._break(error)
        if not ends:
            self._at_end()

    def _break(self, error: BaseException) -> None:
        """End the step, because of an error."""
        self._fail(error)
        self._error = self._error or error

    @torch.no_grad()
    def _at_end(self) -> None:
        """End the step; have raised what has happened in it. Called once for each unit, and after FSDP's own end."""
        while self._step is not None:
            try:
                self._end(self._step)
            except BaseException as error:  # noqa: BLE001  # raised below
                self._break(error)
        if self._error is not None:
            self._source.forget()
            if not call_at_end(self._raise):
                self._raise()
        elif not computes():  # this is no inner pass
            self._calls.clear()
            self._learn()

    def _learn(self) -> None:
        """Look where gradients lie that have come for the first time; the next step compresses them."""
        if not self._source.learn():
            return
        saved, plan = self._residuals(), self._new_plan(self._transport.hosts())
        plan.restore({**saved, "residuals": {**plan.residuals()["residuals"], **saved["residuals"]}})
        self._plan = plan

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
