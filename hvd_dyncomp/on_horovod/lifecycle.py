"""The states of a quantizer and the transitions between them.

    Unbound --attach, take--> Bound --take--> Stepping --collect--> Bound
       ^                        |                 |
       +----- load, suspend ----+-----------------+        Unbound --take (no plan)--> Failed --collect--> Unbound

If Horovod forgets a step (`optimizer.load_state_dict` between backward and step), the next step gives it up, and sends
nothing while anything of it is in flight. Nothing here waits for another rank, except at the beginning of
`optimizer.synchronize()`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any

import torch

from hvd_dyncomp.advice import (
    ANOTHER_OPTIMIZER,
    ASSIGNED,
    CAPTURED,
    IN_FLIGHT,
    OVERWRITTEN,
    REDUCED_AGAIN,
    THROWN_AWAY,
    Advice,
)
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.intake import Taken
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.momentum import advice, leave_out
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.on_horovod.gradients import OptimizerGradients, OptimizerPlan
from hvd_dyncomp.on_horovod.states import Bound, Failed, State, Stepping, Unbound
from hvd_dyncomp.replicas import compare
from hvd_dyncomp.step_levels import StepLevels
from hvd_dyncomp.transport.base import Transport


class Lifecycle:
    """The state of one quantizer. Begins and ends the steps.

    Args:
        settings, names, skip: as in `Plan`.
        transport: connects all ranks.
        levels: the level of each step.
        meter: counts the bytes.
        stochastic: round values stochastically instead of to nearest.

    Attributes:
        state: see the module.
    """

    def __init__(
        self,
        settings: Settings,
        names: dict[torch.Tensor, str] | None,
        skip: Skip | None,
        transport: Transport,
        *,
        levels: StepLevels,
        meter: Meter,
        stochastic: bool,
    ) -> None:
        self._settings, self._names, self._skip, self._transport = settings, names, skip, transport
        self._levels, self._meter, self._stochastic = levels, meter, stochastic
        self.state: State = Unbound(None)
        self._left: Step | None = None  # the latest step abandoned before it was collected
        self._unhook: Callable[[], None] | None = None
        self._advice = Advice()
        self._discarded = False  # whether the latest step was
        self._callers: set[CodeType] = set()  # code that is known to hand over an optimizer's gradients

    @property
    def plan(self) -> OptimizerPlan | None:
        """The plan; None if there is none."""
        return self.state.plan if isinstance(self.state, (Bound, Stepping)) else None

    @property
    def step(self) -> Step | FailedStep | None:
        """The step in flight, or the failed step in its place; None if there is neither."""
        return self.state.step if isinstance(self.state, (Stepping, Failed)) else None

    @property
    def in_flight(self) -> bool:
        """Whether gradients have arrived that Horovod has not got back yet."""
        return isinstance(self.state, Stepping)

    @property
    def label(self) -> str | None:
        """The optimizer's label, if it reduces over all ranks; otherwise, or if no optimizer is known, None."""
        optimizer = self.plan.source.optimizer if self.plan else None
        if self.plan is None or optimizer is None or not horovod_optimizer.among_all(optimizer):
            return None
        return self.plan.source.label

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that the optimizer trains now.

        Raises:
            RuntimeError: no optimizer is known.
        """
        if self.plan is None:
            raise RuntimeError("no optimizer is known yet; call it after a step, or after attach(optimizer)")
        return self.plan.source.trained()

    def check_replicas(self) -> None:
        """See `DynamicQuantizer.check_replicas`."""
        ranks = self._transport if self.plan is None else self.plan.transport
        if ranks.size > 1:
            compare(ranks, lambda: {"": self.trained()}, "hvd_dyncomp.quantizer.replicas")

    def attach(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan:
        """Make a plan for an optimizer and move the residuals into it.

        Raises:
            ValueError: the optimizer cannot be used, or gradients are in flight; nothing has changed.
        """
        if isinstance(self.state, Stepping) and not self.state.forgotten:
            raise ValueError(IN_FLIGHT)
        return self._attach(optimizer)

    def _attach(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan:
        self._abandon()
        source = OptimizerGradients(optimizer, self._names, self._transport)
        plan = OptimizerPlan(source, self._settings, self._skip, self._carried(optimizer))
        plan.transport.advise({bucket.device for bucket in plan.buckets})
        self.state = Bound(plan)
        self._hook(optimizer)
        return plan

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if self._unhook is not None:
            self._unhook()
        # Weakly: the optimizer must not keep an unused quantizer alive.
        this = weakref.ref(self)
        self._unhook = horovod_optimizer.before_synchronize(optimizer, lambda: _compare(this()))

    def take(
        self, compressor: object, gradient: torch.Tensor, caller: FrameType
    ) -> tuple[Taken, Step | FailedStep] | None:
        """Take a gradient; return what became of it and its step, or None for a tensor that is no parameter's gradient.

        Finds the optimizer when it is first needed. The first gradient of a step begins the step.

        Args:
            compressor: the quantizer.
            gradient: the tensor.
            caller: frame of the caller of `compress`.

        Raises:
            RuntimeError: at the first gradient of a step: a CUDA graph is being captured.
            ValueError: another optimizer still exists, or this optimizer's op is neither Average nor Sum. All ranks
                raise it.
            Exception: no plan can be made; the other ranks have been told.
        """
        found = self._parameter_of(compressor, gradient, caller)
        state = self.state
        if isinstance(state, Failed):
            return state.step.take(gradient), state.step
        if found is None:
            return None
        in_flight = isinstance(state, Stepping) and not state.forgotten
        step = state.step if in_flight else uninterrupted(self._begin)  # type: ignore[union-attr]  # it is Stepping
        return step.take(gradient, *found), step

    def _plan_for(self, optimizer: torch.optim.Optimizer) -> OptimizerPlan | None:
        """The plan for the calling optimizer; None if there can be none: the state is then `Failed`.

        Raises what `take` does.
        """
        if isinstance(self.state, Failed):
            return None
        if self.plan is not None:
            bound = self.plan.source.optimizer
            if bound is optimizer and not self.plan.source.outdated:
                return self.plan
            if bound is not None and bound is not optimizer:
                raise ValueError(ANOTHER_OPTIMIZER)
        horovod_optimizer.factor_of(optimizer, 1)
        try:
            return self._attach(optimizer)
        except Exception as error:  # noqa: BLE001  # raised once the others, which wait for this rank, know it
            residuals = self.residuals()
            self._hook(optimizer)
            ranks = self._transport.within(horovod_optimizer.process_set_of(optimizer))
            step = FailedStep(
                error,
                transport=ranks,
                label=horovod_optimizer.label_of(optimizer),
                number=self._levels.steps,
                bits=self._levels.bits,
            )
            if not horovod_optimizer.any_fresh(optimizer):  # so this is no backward, but `synchronize`
                self.state = Unbound(residuals)
                step.check()
            self.state = Failed(step, residuals)
            return None

    def _parameter_of(
        self, compressor: object, gradient: torch.Tensor, caller: FrameType
    ) -> tuple[str, torch.Tensor] | None:
        """Name and parameter of this gradient, or None. Raises what `take` does."""
        if isinstance(self.state, Stepping) and caller.f_code in self._callers:
            found = self.state.plan.source.parameter_of(gradient, caller)
            if found is not None and found[0] not in self.state.step.intake.taken:
                return found
        # The first gradient of a step, one that comes again (from another optimizer?), one that Horovod has made dense,
        # or a tensor that came from elsewhere.
        if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(CAPTURED)
        optimizer, parameter = horovod_optimizer.calling(compressor, caller)
        plan = None if optimizer is None else uninterrupted(lambda: self._plan_for(optimizer))
        if plan is None:
            return None
        self._callers.add(caller.f_code)
        # Horovod makes sparse gradients dense on the way; the tensor is then nobody's .grad.
        found = plan.source.parameter_of(gradient, caller)
        return found if found is not None or parameter is None else plan.source.named_like(parameter)

    def _begin(self) -> Step:
        """Begin a step of the current plan. Give up a step before it that was not collected."""
        plan: OptimizerPlan = self.plan  # type: ignore[assignment]  # the gradient's parameter was known, so there is a plan
        self._warn_of_waste(plan)
        previous = self._leave()
        if previous is not None and isinstance(self.state, Stepping):
            self._levels.steps = previous.number  # not collected: a rank that did collect it now differs
        step = Step(
            plan,
            turn=self._levels.next(alone=plan.source.world_size == 1),
            stochastic=self._stochastic,
            fresh=plan.source.any_fresh(),
            meter=self._meter,
            previous=previous,
        )
        self.state = Stepping(plan, step, horovod_optimizer.pending_of(plan.source.optimizer))
        step.start()
        return step

    def _warn_of_waste(self, plan: OptimizerPlan) -> None:
        """Warn, on rank 0, if the means of the step before were reduced for nothing."""
        optimizer = plan.source.optimizer
        unused = horovod_optimizer.synchronized(optimizer) and horovod_optimizer.any_fresh(optimizer)
        if unused and not self._discarded and plan.waiting and plan.source.rank == 0:
            self._advice.warn("waste", THROWN_AWAY if self._levels.bits < UNCOMPRESSED else "")
        self._discarded = False

    def _leave(self) -> Step | None:
        self._abandon()
        left, self._left = self._left, None
        if left is None or left.over:
            return None
        left.give_up()
        return left

    def collect(self, step: Step | FailedStep) -> None:
        """End a step, and tell the optimizer, which steps next, at how many bits its gradients came.

        Raises what `Step.collect` does.
        """
        if self.step is step:
            self.state = Bound(self.state.plan) if isinstance(self.state, Stepping) else Unbound(self.state.residuals)  # type: ignore[union-attr]
        step.collect()
        if isinstance(step, FailedStep) or self.plan is None or self.plan.source.optimizer is None:
            return
        self._levels.learn(step.proposal)
        self._note(step, self.plan, self.plan.source.optimizer)

    def _note(self, step: Step, plan: OptimizerPlan, optimizer: torch.optim.Optimizer) -> None:
        bits, speaks = step.bits, plan.source.rank == 0
        if not step.fresh:
            if horovod_optimizer.synchronized(optimizer):
                if speaks and plan.slots and bits != UNCOMPRESSED:
                    self._advice.warn("again", REDUCED_AGAIN)
                return  # means, changed by the user and reduced again: they came at the level before
            bits = UNCOMPRESSED
        leave_out(optimizer, plan.waiting, bits)
        if speaks:
            self._advice.warn("assigned", ASSIGNED if step.assigned else "")
            self._advice.warn("overwritten", OVERWRITTEN if step.overwritten else "")
            self._advice.warn("momentum", advice(optimizer) if bits < 1 and plan.waiting else "")

    def load(self, saved: Mapping[str, Any]) -> None:
        """Take over what `residuals` returned; a step in flight is given up.

        Raises:
            ValueError: it does not belong here, as far as is known yet; nothing has changed.
        """
        if self.plan is not None:
            residual_state.check(self.plan.buckets, saved, self.plan.source.rank, self.plan.source.world_size)
        self._abandon()
        self.state = Unbound(saved)

    def discard(self) -> None:
        """Undo what the latest step did to the residuals; see `Plan.discard`."""
        if self.plan is not None:
            self.plan.discard()
            self._discarded = True

    def suspend(self) -> None:
        """Unbind, because ranks may have come or gone: residuals stay this process's own, whatever its rank."""
        self._abandon()
        self._left = None  # the ranks that it was for may be gone
        self.state = Unbound({**self.residuals(), "rank": None})

    def forget(self) -> None:
        """Drop all residuals."""
        if self.plan is not None:
            for bucket in self.plan.buckets:
                bucket.residuals.drop()
        else:
            self.state = Unbound(None)

    def residuals(self) -> dict[str, Any]:
        """Both residuals by parameter name (`residual_state.export`), with rank, world size, factor and hosts."""
        if isinstance(self.state, (Unbound, Failed)) and self.state.residuals is not None:
            return dict(self.state.residuals)
        if self.plan is not None:
            return self.plan.residuals()
        return {"rank": 0, "world_size": 1, "factor": 1.0, "hosts": None, **residual_state.export([])}

    def _carried(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        """The residuals that a new plan for `optimizer` takes over: its own parameters', never another model's."""
        if self.plan is None:
            return self.state.residuals  # type: ignore[union-attr]  # Unbound or Failed
        parameters = set(horovod_optimizer.reduced_parameters(optimizer))
        same = parameters == {parameter for _, parameter in self.plan.source.named}
        return {**self.residuals(), "rank": None} if same else None

    def _abandon(self) -> None:
        """Stop the background work of a step in flight. Call it before its plan's residuals are read or left."""
        if isinstance(self.state, Stepping):
            self._left = self.state.step
            self._left.abandon()


def _compare(lifecycle: Lifecycle | None) -> None:
    """Check that all ranks do the same, before Horovod waits for gradients that may never come."""
    step = None if lifecycle is None else lifecycle.step
    if step is not None:
        with torch.inference_mode(False), torch.no_grad():  # as in the quantizer
            uninterrupted(step.check)
