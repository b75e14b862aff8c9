"""The states of a quantizer, and what leads from one to another.

    Unbound --plan_for, attach--> Bound --begin--> Stepping --end--> Bound
       ^                            |                  |
       +------- load, suspend ------+------------------+        Unbound --(no plan)--> Failed --end--> Unbound

A step that Horovod has forgotten (`optimizer.load_state_dict` between backward and step) is given up when the next one
begins, which sends nothing while anything of that one is under way. Nothing here waits for another rank, but for what
is called at the beginning of `optimizer.synchronize()`.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

from hvd_dyncomp import horovod_optimizer
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.momentum import advice, leave_out
from hvd_dyncomp.transport.base import Transport

logger = logging.getLogger(__name__)


class Unbound(NamedTuple):
    """No optimizer is known: before the first gradient, after a state was loaded, or when ranks have come or gone.

    Attributes:
        debts: what the next plan takes over; None for nothing.
    """

    debts: Mapping[str, Any] | None


class Bound(NamedTuple):
    """Between steps."""

    plan: Plan


class Stepping(NamedTuple):
    """From the first gradient of a step until it is collected.

    Attributes:
        pending: what Horovod has of the step.
    """

    plan: Plan
    step: Step
    pending: dict

    @property
    def forgotten(self) -> bool:
        """Whether Horovod will never ask for this step's gradients."""
        optimizer = self.plan.binding.optimizer
        return optimizer is None or horovod_optimizer.pending_of(optimizer) is not self.pending


class Failed(NamedTuple):
    """This rank cannot make a plan; it raises as soon as the others have heard of it."""

    step: FailedStep
    debts: Mapping[str, Any] | None


State = Unbound | Bound | Stepping | Failed
GiveUp = Callable[[Exception, Transport, str], FailedStep]  # the error, whom to tell, the optimizer's label

_ANOTHER = (
    "a DynamicQuantizer works for one optimizer, and this one has another already; make one DynamicQuantizer per "
    "optimizer (they may share a controller). If the other is to be no more, delete it and call gc.collect(): as long "
    "as it lives, Horovod goes on reducing for it"
)

_IN_FLIGHT = (
    "attach must be called between steps, but gradients are in flight: call optimizer.step() first, or attach before "
    "the first backward pass"
)

_ASSIGNED = (
    "gradients that no backward pass has made (assigned to .grad, as after torch.autograd.grad or torch.func.grad) "
    "travel uncompressed, and the optimizer steps with its momentum; call backward() on a loss to have them compressed"
)

_AGAIN = (
    "gradients were reduced twice in a step, the second time uncompressed (as float32: more bytes than compression has "
    "saved). optimizer.step() synchronizes by itself: after optimizer.synchronize(), write "
    "'with optimizer.skip_synchronize(): optimizer.step()'"
)

_CAPTURED = (
    "gradients cannot be exchanged while a CUDA graph is captured: its replay calls no hooks, and every rank would go "
    "on with gradients of its own. Leave loss.backward() and optimizer.step() out of it; "
    "torch.cuda.make_graphed_callables does so (docs/clusters.md)"
)


class Lifecycle:
    """The state of one quantizer.

    Args:
        settings, names, skip: as in `Plan`.
        transport: among all workers.

    Attributes:
        state: see the module.
    """

    def __init__(
        self,
        settings: Settings,
        names: dict[torch.Tensor, str] | None,
        skip: Skip | None,
        transport: Transport,
    ) -> None:
        self._settings, self._names, self._skip, self._transport = settings, names, skip, transport
        self.state: State = Unbound(None)
        self._left: Step | None = None  # the latest that was left before it was collected
        self._unhook: Callable[[], None] | None = None
        self._said: set[str] = set()
        self._callers: set[CodeType] = set()  # code that is known to hand over an optimizer's gradients

    @property
    def plan(self) -> Plan | None:
        """None while there is none."""
        return self.state.plan if isinstance(self.state, (Bound, Stepping)) else None

    @property
    def step(self) -> Step | FailedStep | None:
        """What is in flight, or stands in for it."""
        return self.state.step if isinstance(self.state, (Stepping, Failed)) else None

    @property
    def label(self) -> str | None:
        """Of the optimizer, if it reduces over all workers; None while none is known."""
        optimizer = self.plan.binding.optimizer if self.plan else None
        if self.plan is None or optimizer is None or not horovod_optimizer.among_all(optimizer):
            return None
        return self.plan.binding.label

    def attach(self, optimizer: torch.optim.Optimizer) -> Plan:
        """Makes a plan for an optimizer; what is owed goes over into it.

        Raises:
            ValueError: the optimizer cannot be used, or gradients are in flight; nothing has changed then.
        """
        if isinstance(self.state, Stepping) and not self.state.forgotten:
            raise ValueError(_IN_FLIGHT)
        return self._attach(optimizer)

    def _attach(self, optimizer: torch.optim.Optimizer) -> Plan:
        self.abandon()
        plan = Plan(optimizer, self._names, self._settings, self._skip, self._carried(optimizer), self._transport)
        plan.transport.advise({bucket.device for bucket in plan.buckets})
        self.state = Bound(plan)
        self._hook(optimizer)
        return plan

    def _hook(self, optimizer: torch.optim.Optimizer) -> None:
        if self._unhook is not None:
            self._unhook()
        # Weakly: the optimizer is not to keep alive a quantizer that nobody wants any more.
        this = weakref.ref(self)
        self._unhook = horovod_optimizer.before_synchronize(optimizer, lambda: _compare(this()))

    def plan_for(self, optimizer: torch.optim.Optimizer, give_up: GiveUp) -> Plan | None:
        """The plan for the optimizer that has been seen to call; None if there can be none: then the state is `Failed`.

        Args:
            give_up: tells the other ranks why.

        Raises:
            ValueError: another optimizer is still there, or this one's op is neither Average nor Sum. So it is on all
                ranks.
            Exception: there can be no plan, and the others have heard of it.
        """
        if isinstance(self.state, Failed):
            return None
        if self.plan is not None:
            bound = self.plan.binding.optimizer
            if bound is optimizer and not self.plan.binding.outdated:
                return self.plan
            if bound is not None and bound is not optimizer:
                raise ValueError(_ANOTHER)
        horovod_optimizer.factor_of(optimizer, 1)
        try:
            return self._attach(optimizer)
        except Exception as error:  # noqa: BLE001  # raised when the others, who wait for this rank, have heard of it
            debts = self.debts()
            self._hook(optimizer)
            ranks = self._transport.within(horovod_optimizer.process_set_of(optimizer))
            step = give_up(error, ranks, horovod_optimizer.label_of(optimizer))
            if not horovod_optimizer.any_fresh(optimizer):  # so this is no backward, but `synchronize`
                self.state = Unbound(debts)
                step.check()
            self.state = Failed(step, debts)
            return None

    def whose(
        self, compressor: object, gradient: torch.Tensor, caller: FrameType, give_up: GiveUp
    ) -> tuple[str, torch.Tensor] | None:
        """Name and parameter whose gradient this is, or None. Finds the optimizer when that is first needed.

        Args:
            compressor: the quantizer.
            caller: of its `compress`.
            give_up: as in `plan_for`.

        Raises:
            RuntimeError: with the first gradient of a step: a CUDA graph is captured.
            ValueError, Exception: as in `plan_for`.
        """
        if isinstance(self.state, Stepping) and caller.f_code in self._callers:
            found = self.state.plan.binding.whose(gradient, caller)
            if found is not None and found[0] not in self.state.step.intake.taken:
                return found
        # The first gradient of a step, one that comes again (from another optimizer?), one that Horovod has made dense,
        # or a tensor that came from elsewhere.
        if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(_CAPTURED)
        optimizer, parameter = horovod_optimizer.calling(compressor, caller)
        plan = None if optimizer is None else uninterrupted(lambda: self.plan_for(optimizer, give_up))
        if plan is None:
            return None
        self._callers.add(caller.f_code)
        # Horovod makes sparse gradients dense on the way; the tensor is then nobody's .grad.
        found = plan.binding.whose(gradient, caller)
        return found if found is not None or parameter is None else plan.binding.named_like(parameter)

    def leave(self) -> Step | None:
        """Before a step begins: the one before, if it was not collected. It is given up."""
        self.abandon()
        left, self._left = self._left, None
        if left is None or left.over:
            return None
        left.give_up()
        return left

    def begin(self, step: Step) -> None:
        """A step of the current plan."""
        plan: Plan = self.plan  # type: ignore[assignment]  # a step has been made for it
        self.state = Stepping(plan, step, horovod_optimizer.pending_of(plan.binding.optimizer))
        step.start()

    def end(self, step: Step | FailedStep) -> None:
        """`step` is about to be collected."""
        if self.step is step:
            self.state = Bound(self.state.plan) if isinstance(self.state, Stepping) else Unbound(self.state.debts)  # type: ignore[union-attr]

    def collected(self, step: Step | FailedStep) -> None:
        """All of `step` is over: the optimizer, which steps next, is told how its gradients have come."""
        plan = self.plan
        optimizer = plan.binding.optimizer if plan else None
        if plan is None or optimizer is None or isinstance(step, FailedStep):
            return
        bits = step.bits
        if not step.fresh:
            if horovod_optimizer.synchronized(optimizer):
                if plan.binding.rank == 0 and plan.slots and bits != UNCOMPRESSED:
                    self._say("again", _AGAIN)
                return  # means that the user has changed, and that were reduced again: they came at the level before
            bits = UNCOMPRESSED
        leave_out(optimizer, plan.waiting, bits)
        if plan.binding.rank == 0:
            self._say("assigned", _ASSIGNED if step.assigned else "")
            self._say("momentum", advice(optimizer) if bits < 1 and plan.waiting else "")

    def _say(self, what: str, text: str) -> None:
        """A warning, but each only once."""
        if text and what not in self._said:
            self._said.add(what)
            logger.warning(text)

    def load(self, debts: Mapping[str, Any]) -> None:
        """Takes over what `debts` has returned; a step in flight is given up.

        Raises:
            ValueError: it does not belong here, as far as that is known yet; nothing has changed then.
        """
        if self.plan is not None:
            residual_state.check(self.plan.buckets, debts, self.plan.binding.rank, self.plan.binding.world_size)
        self.abandon()
        self.state = Unbound(debts)

    def suspend(self) -> None:
        """To be called when ranks may have come or gone: what is owed stays this process's own, whatever its rank."""
        self.abandon()
        self._left = None  # with the ranks that it was for
        self.state = Unbound({**self.debts(), "rank": None})

    def forget(self) -> None:
        """Nothing is owed any more."""
        if self.plan is not None:
            for bucket in self.plan.buckets:
                bucket.residuals.drop()
        else:
            self.state = Unbound(None)

    def debts(self) -> dict[str, Any]:
        """Both residuals by parameter name (`residual_state.export`), and whose they are."""
        if isinstance(self.state, (Unbound, Failed)) and self.state.debts is not None:
            return dict(self.state.debts)
        binding = self.plan.binding if self.plan else None
        return {
            "rank": binding.rank if binding else 0,
            "world_size": binding.world_size if binding else 1,
            "factor": binding.factor if binding else 1.0,
            "hosts": list(map(list, self.plan.arranged.hosts)) if self.plan and self.plan.arranged else None,
            **residual_state.export(self.plan.buckets if self.plan else []),
        }

    def _carried(self, optimizer: torch.optim.Optimizer) -> Mapping[str, Any] | None:
        """What a new plan for `optimizer` takes over: its own parameters' debts, and not another model's."""
        if self.plan is None:
            return self.state.debts  # type: ignore[union-attr]  # Unbound or Failed
        parameters = set(horovod_optimizer.reduced_parameters(optimizer))
        same = parameters == {parameter for _, parameter in self.plan.binding.named}
        return {**self.debts(), "rank": None} if same else None

    def abandon(self) -> None:
        """A step in flight does no more by itself: to be called before its plan's residuals are read or left."""
        if isinstance(self.state, Stepping):
            self._left = self.state.step
            self._left.abandon()


def _compare(lifecycle: Lifecycle | None) -> None:
    """Before Horovod waits for gradients, and perhaps for what never comes: do all ranks do the same?"""
    step = None if lifecycle is None else lifecycle.step
    if step is not None:
        with torch.inference_mode(False), torch.no_grad():  # as in the quantizer
            uninterrupted(step.check)
