"""The session of a Horovod optimizer: which optimizer it works for, and when its steps begin."""

from __future__ import annotations

import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.buckets import Bucket
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.topology import Topology
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.on_horovod.gradients import OptimizerGradients
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import ANOTHER_OPTIMIZER, CAPTURED, FORGOTTEN, GROUPS, IN_FLIGHT, INFERENCE
from hvd_dyncomp.sessions.options import checked_names
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.base import Transport, gather_json, gathered_json, start_gather_json


class OptimizerSession(Session):
    """The session of one optimizer, which is found at the first gradient, or named by `attach`.

    Without `attach`, the ranks' hosts are gathered during the first step, which Horovod reduces uncompressed.

    Args:
        controller, transport, arguments: see `Session`.
        named_parameters: see `DynamicQuantizer`.
    """

    default_controller = None
    made_by = "DynamicQuantizer"

    def __init__(
        self,
        controller: Controller | Policy | float | None,
        transport: Transport,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
        **arguments: Any,
    ) -> None:
        super().__init__(controller, transport, **arguments)
        named = None if named_parameters is None else checked_names(named_parameters)
        self._names = None if named is None else {parameter: name for name, parameter in named}
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = lambda: None  # a weak reference
        self._source: OptimizerGradients | None = None  # that of the plan
        self._slots: Mapping[torch.Tensor, Slot] = {}  # likewise, by parameter
        self._hosts: Any = None  # the collective in flight that gathers them
        self._again = False  # whether the program has reduced, and changed, the gradients of that step before
        self._pending: dict | None = None  # what Horovod has of the latest step
        self._unhooks: Sequence[Callable[[], None]] = ()
        self._entered = 0.0  # when Horovod last went on to wait for gradients

    @property
    def _control_transport(self) -> Transport:
        return super()._control_transport if self._plan is not None or self._optimizer() is None else self._ranks()[0]

    @abstractmethod
    def _on_gradient(self, parameter: torch.Tensor) -> tuple[Callable, Any] | None:
        """Take a gradient that would be handed to Horovod; None if Horovod is to call `compress`."""

    def _attach(self, optimizer: torch.optim.Optimizer, hosts: Sequence[str] | None) -> None:
        """Bind to an optimizer between steps; `hosts` as in `_bind`. Raises what `DynamicQuantizer.attach` does."""
        if self._step is not None:
            if not self._forgotten:
                raise ValueError(IN_FLIGHT)
            self._fail(RuntimeError(FORGOTTEN))
        self._check_failure()
        self._bind(optimizer, hosts)

    @property
    def _forgotten(self) -> bool:
        """Whether Horovod will never ask for the gradients of the latest step."""
        optimizer = self._optimizer()
        return optimizer is None or horovod_optimizer.pending_of(optimizer) is not self._pending

    def _open(self, optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> None:
        """Begin a step, unless there is one, with a gradient of (or as) `tensor`. Raises what `_is_gradient` does."""
        # Not final, and nothing is sent: the other ranks capture the same graph.
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        self._check_optimizer(optimizer)
        if self._step is None:
            self._begin_step(optimizer)

    def _is_gradient(self, gradient: torch.Tensor, caller: FrameType) -> bool:
        """Whether a tensor is a gradient of a step, which it may have begun.

        Raises:
            ValueError: another optimizer still exists, or this optimizer's op is neither Average nor Sum. All ranks
                raise it.
            Exception: no step can be begun; the other ranks have been told.
        """
        optimizer, parameter = horovod_optimizer.calling(self, caller)
        if optimizer is None or parameter is None:
            return False
        if self._step is None or self._forgotten or optimizer is not self._optimizer():
            self._open(optimizer, gradient)
        return self._source.reduces(parameter)  # type: ignore[union-attr]  # that of the step

    def _check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Note whose gradients come. A step that Horovod has forgotten has failed."""
        if self._step is not None and self._forgotten:
            self._fail(RuntimeError(FORGOTTEN))
        if self._plan is not None and self._source is not None:
            bound = self._source.optimizer
            if bound is optimizer and not self._source.outdated:
                return
            if bound is not None and bound is not optimizer:
                raise ValueError(ANOTHER_OPTIMIZER)
        horovod_optimizer.factor_of(optimizer, 1)
        self._saved, self._plan = self._carried(optimizer), None
        self._optimizer = weakref.ref(optimizer)

    def _begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a step; if it is not known yet where the ranks are, begin to gather that, too."""
        self._pending = horovod_optimizer.pending_of(optimizer)
        self._again = horovod_optimizer.reduced_already(optimizer)
        self._begin()
        if not self._plan.placed:  # type: ignore[union-attr]  # the step's
            ranks, label = self._plan.transport, self._source.label  # type: ignore[union-attr]
            self._hosts = start_gather_json(ranks, ranks.host, f"hvd_dyncomp.{label}.hosts")

    def _plan_of_step(self) -> Plan:
        if self._plan is not None:
            return self._plan
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "the optimizer of this quantizer has been deleted; keep it as long as the quantizer is used"
            )
        return self._bind(optimizer)

    def _level(self, bits: float) -> float:
        super()._level(bits)
        if bits < UNCOMPRESSED and self._source.grouped:  # type: ignore[union-attr]  # there is one
            raise ValueError(GROUPS)
        return UNCOMPRESSED if self._aside else bits

    @property
    def _aside(self) -> bool:
        """Whether the step that begins touches no residual, at 32 bits: without a place for them, or gradients anew."""
        return self._again or self._plan is None or not self._plan.placed

    @property
    def _waiting(self) -> bool:
        return super()._waiting and not self._aside

    def _taking_part(self) -> Sequence[Bucket] | None:
        return () if self._aside else None

    def _to_agree_on(self) -> dict[str, Any]:
        return {**super()._to_agree_on(), "attached": self._plan.placed}  # type: ignore[union-attr]  # there is one

    def _end(self, step: Step) -> None:
        super()._end(step)
        if self._hosts is not None:
            gathered, self._hosts = self._hosts, None
            hosts = gathered_json(self._plan.transport.wait(gathered))  # type: ignore[union-attr]  # there is one
            self._bind(self._optimizer(), hosts)  # type: ignore[arg-type]  # it is calling

    def _note_exchange(self, bits: float) -> None:
        if not self._again:  # else they are the means of the step before
            super()._note_exchange(bits)

    def _bind(self, optimizer: torch.optim.Optimizer, hosts: Sequence[str] | None = None) -> Plan:
        """Make a plan for an optimizer, with the residuals. Raises what `attach` does; nothing has changed then.

        Args:
            hosts: every rank's; None if they are not known yet.
        """
        source = OptimizerGradients(optimizer, self._names, self._transport)
        if hosts is None and source.world_size == 1:
            hosts = [source.transport.host]
        saved = self._carried(optimizer)
        with torch.inference_mode(False):  # as in `Session._new_plan`
            plan = Plan(source, self._settings, self._skip, None if hosts is None else Topology.of(hosts))
        if saved is not None:
            (plan.restore if plan.placed else plan.check)(saved)
        source.transport.advise({bucket.device for bucket in plan.buckets})
        self._slots = {parameter: plan.slots[name] for name, parameter in source.named if name in plan.slots}
        self._optimizer, self._source, self._plan = weakref.ref(optimizer), source, plan
        self._saved = None if plan.placed else saved
        self._hook(optimizer)
        return plan

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        for unhook in self._unhooks:
            unhook()
        # Weakly: the optimizer must not keep an unused quantizer alive.
        this = weakref.ref(self)
        self._unhooks = (
            horovod_optimizer.before_synchronize(optimizer, lambda: _compare(this())),
            horovod_optimizer.before_reduction(optimizer, lambda parameter: _offer(this(), parameter)),
        )

    def _carried(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        """The residuals that a new plan for `optimizer` takes over: its own parameters', never another model's."""
        if self._plan is None or not self._plan.placed:
            return self._saved
        parameters = set(horovod_optimizer.reduced_parameters(optimizer))
        if parameters != {parameter for _, parameter in self._plan.source.named}:
            return None
        state = self._residuals()
        if self._has_rank_of(state):
            return state
        if residual_state.waiting(state):
            residual_state.warn_of_loss(self._transport.rank)
        return None

    def _has_rank_of(self, state: Mapping[str, Any]) -> bool:
        """Whether this process still has the rank with which it saved residuals, among as many."""
        ranks = self._transport if self._source is None else self._source.transport
        return (state["rank"], state["world_size"]) == (ranks.rank, ranks.size)

    def _ranks(self) -> tuple[Transport, str]:
        optimizer = self._optimizer()
        ranks = self._transport.within(horovod_optimizer.process_set_of(optimizer))
        return ranks, horovod_optimizer.label_of(optimizer)

    def _residuals(self) -> Mapping[str, Any]:
        if self._plan is not None and self._plan.placed:
            return self._plan.residuals()
        nothing = {"rank": None, "world_size": 1, "hosts": None, **residual_state.export([])}
        return nothing if self._saved is None else self._saved

    def _restore(self, state: Mapping[str, Any]) -> None:
        if self._plan is not None and self._plan.placed:
            self._plan.restore(state)
            return
        if self._plan is not None:
            self._plan.check(state)
        self._saved = state

    def sync(self) -> None:
        """Take over rank 0's step count: for workers that join (`elastic`). Collective.

        Residuals stay if all ranks are the same as before. Otherwise they begin at zero on all of them.
        """
        self._reset()
        saved = self._residuals()
        mine: dict[str, Any] = {"stays": self._has_rank_of(saved), "waiting": residual_state.waiting(saved)}
        mine["steps"] = self._steps
        everyone = gather_json(self._transport, mine, "hvd_dyncomp.quantizer.sync")
        stay = all(each["stays"] for each in everyone)
        if not stay and any(each["waiting"] for each in everyone):
            residual_state.warn_of_loss(self._transport.rank)
        self._saved, self._plan = saved if stay else None, None
        self._steps = everyone[0]["steps"]

    def _reset(self) -> None:
        """Forget a step in flight, and an error: what they were for is over, as elastic training forms the job anew."""
        if self._step is not None:
            self._step.abandon()
        self._step, self._hosts, self._failure = None, None, ""

    @torch.no_grad()
    def _check_step(self) -> None:
        """Check that all ranks do the same, before Horovod waits for gradients that may never come."""
        self._check_failure()
        if self._step is not None and torch.is_inference_mode_enabled():
            raise RuntimeError(INFERENCE)  # nothing is lost: the program may call it again
        try:
            if self._step is not None:
                self._step.await_agreement()
        except BaseException as error:
            self._fail(error)
            raise
        self._entered = time.perf_counter()


def _compare(session: OptimizerSession | None) -> None:
    if session is not None:
        session._check_step()


def _offer(session: OptimizerSession | None, parameter: torch.Tensor) -> tuple | None:
    return None if session is None else session._on_gradient(parameter)
