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
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.source import checked_names
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.on_horovod.gradients import OptimizerGradients
from hvd_dyncomp.on_horovod.step_gradients import StepGradients
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import ANOTHER_OPTIMIZER, CAPTURED, FORGOTTEN, IN_FLIGHT, INFERENCE
from hvd_dyncomp.sessions.session import Session
from hvd_dyncomp.transport.base import Transport, gather_json


class OptimizerSession(Session):
    """The session of one optimizer, which is found at the first gradient, or named by `attach`.

    Args:
        controller, transport, arguments: see `Session`.
        named_parameters: see `DynamicQuantizer`.
    """

    default_controller = None
    knows_its_model = False
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
        self._optimizer: Callable[[], torch.optim.Optimizer | None] = _no_optimizer  # a weak reference
        self._source: OptimizerGradients | None = None  # that of the plan
        self._slots: Mapping[torch.Tensor, Slot] = {}  # likewise, by parameter
        self._step_gradients: StepGradients | None = None  # of the step in flight
        # Whether compressed gradients of the latest step do not pass through Horovod; the same on all ranks.
        self._direct = False
        self._pending: dict | None = None  # what Horovod has of the latest step
        self._unhooks: Sequence[Callable[[], None]] = ()
        self._entered = 0.0  # when Horovod last went on to wait for gradients

    @property
    def _ours(self) -> Transport:
        return super()._ours if self._plan is not None or self._optimizer() is None else self._ranks()[0]

    @abstractmethod
    def _on_gradient(self, parameter: torch.Tensor) -> tuple[Callable, Any] | None:
        """Take a gradient that would be handed to Horovod; None if Horovod is to call `compress`."""

    def _attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Bind to an optimizer between steps. Raises what `DynamicQuantizer.attach` does."""
        if isinstance(self._step, Step):
            if not self._forgotten:
                raise ValueError(IN_FLIGHT)
            self._fail(RuntimeError(FORGOTTEN))
        self._check_failure()
        self._step = None
        self._bind(optimizer)

    @property
    def _forgotten(self) -> bool:
        """Whether Horovod will never ask for the gradients of the latest step."""
        optimizer = self._optimizer()
        return optimizer is None or horovod_optimizer.pending_of(optimizer) is not self._pending

    def _open(self, optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> None:
        """Begin a step, unless there is one, with a gradient of (or as) `tensor`. Raises what `_searched` does."""
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        self._meet(optimizer)
        if self._step is None:
            self._first(optimizer)

    def _searched(self, gradient: torch.Tensor, caller: FrameType) -> tuple[str, torch.Tensor] | None:
        """Name and parameter of this gradient, in the step that it begins or belongs to; None for any other tensor.

        Raises:
            RuntimeError: a CUDA graph is being captured.
            ValueError: another optimizer still exists, or this optimizer's op is neither Average nor Sum. All ranks
                raise it.
            Exception: no step can be begun; the other ranks have been told.
        """
        optimizer, parameter = horovod_optimizer.calling(self, caller)
        if optimizer is None or parameter is None:
            return None
        if self._step is None or self._forgotten or optimizer is not self._optimizer():
            self._open(optimizer, gradient)
        name = None if self._source is None else self._source.name_of(parameter)
        return None if name is None else (name, parameter)

    def _meet(self, optimizer: torch.optim.Optimizer) -> None:
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

    def _first(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a step."""
        self._pending = horovod_optimizer.pending_of(optimizer)
        # In a plan's first step the others cannot know yet that this rank knows its optimizer.
        known = self._plan is not None and self._plan.topology_checksum
        step = self._begin()
        self._direct = bool(known and step.bits != UNCOMPRESSED and self._source and not self._source.grouped)
        if self._source is not None and self._plan is not None:
            mixed = len(self._plan.slots) < len(self._source.named)
            self._step_gradients = StepGradients(step, self._source, on_device=mixed and self._source.grouped)

    def _new_plan(self) -> Plan:
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError(
                "the optimizer of this quantizer has been deleted; keep it as long as the quantizer is used"
            )
        return self._bind(optimizer)

    def _bind(self, optimizer: torch.optim.Optimizer) -> Plan:
        """Make a plan for an optimizer, with the residuals. Raises what `attach` does; nothing has changed then."""
        source = OptimizerGradients(optimizer, self._names, self._transport)
        with torch.inference_mode(False):  # as in `Session._new_plan`
            plan = Plan(source, self._settings, self._skip, self._carried(optimizer))
        source.transport.advise({bucket.device for bucket in plan.buckets})
        self._slots = {parameter: plan.slots[name] for name, parameter in source.named if name in plan.slots}
        self._optimizer, self._source, self._plan, self._saved = weakref.ref(optimizer), source, plan, None
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
        if self._plan is None:
            return self._saved
        parameters = set(horovod_optimizer.reduced_parameters(optimizer))
        same = parameters == {parameter for _, parameter in self._plan.source.named}
        return {**self._residuals(), "rank": None} if same else None

    def _ranks(self) -> tuple[Transport, str]:
        optimizer = self._optimizer()
        ranks = self._transport.within(horovod_optimizer.process_set_of(optimizer))
        return ranks, horovod_optimizer.label_of(optimizer)

    def _from_backward(self) -> bool:
        return horovod_optimizer.any_from_backward(self._optimizer())

    def sync(self) -> None:
        """Take over rank 0's step count: for workers that join (`elastic`). Collective.

        Residuals belong to each rank: a worker that joins has none.
        """
        self._reset()
        # Ranks may have come or gone: residuals stay this process's own, whatever its rank.
        self._saved, self._plan = {**self._residuals(), "rank": None}, None
        [first, *_] = gather_json(self._transport, self._levels.state_dict(), "hvd_dyncomp.quantizer.sync")
        self._levels.load_state_dict(first)

    def _reset(self) -> None:
        """Forget a step in flight, and an error: what they were for is over, as elastic training forms the job anew."""
        if self._step is not None:
            self._step.abandon()
        self._step, self._failure = None, ""

    @torch.no_grad()
    def _check_step(self) -> None:
        """Check that all ranks do the same, before Horovod waits for gradients that may never come."""
        self._check_failure()
        if self._step is not None and torch.is_inference_mode_enabled():
            raise RuntimeError(INFERENCE)  # nothing is lost: the program may call it again
        try:
            if self._step is not None:
                self._await_agreement(self._step)
        except BaseException as error:
            self._fail(error)
            raise
        self._entered = time.perf_counter()

    def _await_agreement(self, step: Step) -> None:
        """Wait until all ranks are known to do the same in a step. Raises what `Step.await_agreement` does."""
        step.await_agreement()
        if step.first_of_plan:
            self._through_horovod()

    def _through_horovod(self) -> None:
        """Have Horovod reduce tickets of compressed gradients after all: on another rank it waits for them."""
        optimizer = self._optimizer()
        if self._direct and optimizer is not None:
            self._direct = False
            horovod_optimizer.take_back(optimizer)
            horovod_optimizer.hand_in(optimizer)


def _compare(session: OptimizerSession | None) -> None:
    if session is not None:
        session._check_step()


def _offer(session: OptimizerSession | None, parameter: torch.Tensor) -> tuple | None:
    return None if session is None else session._on_gradient(parameter)


def _no_optimizer() -> None:
    """As a reference to an optimizer that is gone."""
