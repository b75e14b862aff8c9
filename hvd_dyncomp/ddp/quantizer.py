"""The quantizer of a model: its plan with the residuals, its levels and its meter."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp import replicas
from hvd_dyncomp.advice import CAPTURED, NO_OPTIMIZER, Advice
from hvd_dyncomp.checks import one_of, shown
from hvd_dyncomp.controller import Controller, controller_from
from hvd_dyncomp.ddp.agreement import agree, description
from hvd_dyncomp.ddp.backward import Backward, call_at_end
from hvd_dyncomp.ddp.model import HOOKED, Hooks, ModelGradients, check_kind, check_model
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.momentum import advice, leave_out
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.step_levels import StepLevels
from hvd_dyncomp.transport.torch_distributed import time_limit, transport

logger = logging.getLogger(__name__)

TWINS = (
    "a model is compressed whose parameters are those of a compressed one in names, shapes and values, so whether all "
    "ranks compress the two in the same order cannot be checked: compress them from a list, not from a set"
)


class Quantizer:
    """The quantizer that `compress` returns.

    Attributes:
        controller: decides the level.
        bits: level of the next step, as in `DynamicQuantizer`.
        meter: the `Meter` of the bytes that this rank has sent. It does not count sparse gradients.

    Raises, from `loss.backward()` on every rank:
        LockstepError: the ranks differ in parameters, settings, level or step.
        ConnectionError: another rank has ended.
        TimeoutError: another rank does not answer in time.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        controller: Controller | Policy | float | None = None,
        *,
        timeout: float | timedelta | None = None,
        **arguments: Any,
    ) -> None:
        check_kind(model)
        limit: float | None = None
        wrong: Exception | None = None
        try:
            limit = None if timeout is None else time_limit(timeout)
        except ValueError as error:
            wrong = error
        self._group = model.process_group
        # A group with NCCL only gathers the ranks' addresses on the current GPU, which may not be the model's.
        on_own_gpu = torch.cuda.device(model.device) if model.device.type == "cuda" else contextlib.nullcontext()
        with on_own_gpu:
            self._transport = transport(self._group, timeout=limit)
        self._transport.models += 1  # also of calls that fail: it is part of names, and must be the same on all ranks
        mine: list[Any] = []
        try:
            if wrong is None:
                self._prepare(model, controller, **arguments)
                mine = description(self._source.named)
        except Exception as error:  # noqa: BLE001  # raised when the other ranks have heard of it
            wrong = error
        number = agree(self._transport, mine, wrong)
        try:
            model.register_comm_hook(self, _hook)
        except RuntimeError as error:
            raise ValueError(HOOKED) from error
        model._comm_hooks = Hooks(model._comm_hooks)
        if number in self._transport.compressed and self._transport.rank == 0:
            logger.warning(TWINS)
        self._transport.compressed[number] = self
        replicas.register(self.controller, self)

    def _prepare(
        self,
        model: DistributedDataParallel,
        controller: Controller | Policy | float | None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        rounding: str = "nearest",
        skip: Skip | None = None,
        warmup_steps: int = 0,
        warmup_bits: float = UNCOMPRESSED,
        **settings: Any,
    ) -> None:
        """Check the arguments and make everything, but leave the model as it is.

        Raises:
            TypeError, ValueError: an argument has a wrong type or value, or the model cannot be compressed.
        """
        check_model(model)
        unknown = sorted(set(settings) - {field.name for field in dataclasses.fields(Settings)})
        if unknown:
            raise TypeError(f"compress takes no argument {unknown[0]}")
        self._settings = Settings(**settings)
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"optimizer must be a torch.optim.Optimizer or None, got {shown(optimizer)}")
        while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
            optimizer = inner  # Accelerate and Lightning wrap the one that steps
        if skip is not None and not callable(skip):
            raise TypeError(f"skip must be a function of name and parameter, got {shown(skip)}")
        self._stochastic = one_of("rounding", rounding, ("nearest", "stochastic")) == "stochastic"
        self.controller = controller_from(controller, self._transport)
        self._levels = StepLevels(
            self.controller,
            warmup_steps=warmup_steps,
            warmup_bits=warmup_bits,
            auto_level=self._settings.auto_level,
        )
        self.meter = Meter()
        embeddings = [module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))]
        sparse = {module.weight for module in embeddings if module.sparse}
        self._skip = lambda name, parameter: parameter in sparse or (skip is not None and skip(name, parameter))
        self._source, self._optimizer = ModelGradients(model, self._transport, optimizer), optimizer
        # All of them: the model's buckets keep what has been frozen since they were made.
        self._names = {parameter: name for name, parameter in model.module.named_parameters()}
        self._plan = Plan(self._source, self._settings, self._skip, None)
        self._lock, self._advice = threading.Lock(), Advice()
        self._backward: Backward | None = None
        self._error: Exception | None = None  # that backward has not raised yet
        self._interruption: BaseException | None = None  # likewise, of a signal handler
        self._failure: Exception | None = None  # why this rank cannot go on

    @property
    def label(self) -> str | None:
        """Part of the names of its collectives; None if the controller has another transport."""
        return self._source.label if self.controller.transport is self._transport else None

    @property
    def bits(self) -> float:
        """See the class."""
        return self._levels.bits

    def relative_errors(self) -> dict[str, float]:
        """As `DynamicQuantizer.relative_errors`."""
        plan = self._plan
        return residual_state.relative_errors(plan.buckets, plan.source.named, plan.source.factor)

    def discard(self) -> None:
        """As `DynamicQuantizer.discard`: after `backward` and instead of `optimizer.step()`, on every rank.

        Raises:
            RuntimeError: backward is under way, or `compress` was called without `discardable=True`; nothing has
                changed.
        """
        self._between_steps("discard")
        self._plan.discard()

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        """(name, parameter) of all that training changes as the model is now, whether it is reduced or not."""
        return self._source.trained()

    def check_replicas(self) -> None:
        """As `DynamicQuantizer.check_replicas`, of every parameter of the model that is trained, or reduced."""
        if self._transport.size > 1:
            replicas.compare(
                self._transport, lambda: {"": self.trained()}, f"hvd_dyncomp.{self._source.label}.replicas"
            )

    def drop_residuals(self) -> None:
        """Drop all residuals, as for another fold of a cross-validation. Call it on every rank, between steps.

        Raises:
            RuntimeError: backward is under way; nothing has changed then.
        """
        self._between_steps("drop_residuals")
        for bucket in self._plan.buckets:
            bucket.residuals.drop()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, the step count and the meter. Save one per rank, between steps.

        Contains tensors, numbers, strings, lists and dicts only.

        Raises:
            RuntimeError: backward is under way.
        """
        self._between_steps("state_dict")
        return {**self._plan.residuals(), **self._levels.state_dict(), "meter": self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of the same rank of a run with the same parameters.

        Raises:
            ValueError: the state is not from a quantizer, or from another rank or other parameters; nothing has
                changed.
            RuntimeError: backward is under way; nothing has changed then.
        """
        self._between_steps("load_state_dict")
        try:
            state = residual_state.checked(state)
            StepLevels.check(state)
            Meter().load_state_dict(state["meter"])
        except Exception as error:  # a file may contain anything
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(f"state must come from state_dict(), got {shown(state)}: {cause}") from error
        residual_state.check(self._plan.buckets, state, self._transport.rank, self._transport.size)
        self._plan = Plan(self._source, self._settings, self._skip, state)
        self._levels.load_state_dict(state)
        self.meter.load_state_dict(state["meter"])
        self._failure = self._error = None

    def __reduce__(self) -> tuple:
        raise TypeError(
            "a quantizer of hvd_dyncomp.ddp belongs to its model and cannot be copied or pickled: compress a copy of "
            "the model, and load this one's state_dict()"
        )

    def _between_steps(self, what: str) -> None:
        if self._backward is not None and not self._backward.over.is_set():
            raise RuntimeError(f"{what} must be called between steps, but gradients are in flight")

    def take(self, bucket: dist.GradBucket) -> tuple[torch.futures.Future[torch.Tensor], Callable[[], None] | None]:
        """Take a bucket of the model; return its future. Does not block; all gradients become means together.

        What raises here is raised when backward has ended, as the model could never be used again otherwise; and in
        every step from then on, until a state is loaded. The second result is None, or for the last bucket outside
        backward (`join`) a function that waits and raises.
        """
        with torch.no_grad(), self._lock:
            if self._backward is None or self._backward.complete:
                self._backward = self._begin(bucket)
            backward = self._backward
            future = backward.add(bucket, self._names)
            self._failure = self._failure or backward.failure
            # Not is_last(), which torch says of no bucket in the first pass with `static_graph`.
            if backward.gradients < self._source.count:
                return future, None
            waiting = backward.waiting(self._raise, self.interrupted)
            next(waiting)
            within = call_at_end(waiting.__next__)  # type: ignore[attr-defined]  # a generator has it
            backward.end()
        return future, None if within else lambda: self._conclude(backward)

    def interrupted(self, interruption: BaseException) -> None:
        """Keep what a signal handler has raised until backward has ended."""
        self._interruption = self._interruption or interruption

    def _begin(self, bucket: dist.GradBucket) -> Backward:
        step: Step | FailedStep
        try:
            if self._failure is not None:
                raise self._failure
            if bucket.buffer().is_cuda and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(CAPTURED)
            step = Step(
                self._plan,
                turn=self._levels.next(alone=self._transport.size == 1),
                stochastic=self._stochastic,
                fresh=True,
                meter=self.meter,
            )
            step.start()
        except Exception as error:  # noqa: BLE001  # raised where backward ends, when the others have been told
            self._failure = error
            step = FailedStep(
                error,
                transport=self._transport,
                label=self._source.label,
                number=self._levels.steps,
                bits=UNCOMPRESSED,
            )
        return Backward(step, factor=self._source.factor, group=self._group, ended=self._ended)

    def _ended(self, step: Step | FailedStep, error: Exception | None) -> None:
        if error is None and isinstance(step, Step):
            try:
                self._levels.learn(step.proposal)
                if self._optimizer is not None:
                    leave_out(self._optimizer, self._plan.waiting, step.bits)
                if step.bits < 1 and self._plan.waiting and self._source.rank == 0:
                    self._advice.warn("momentum", advice(self._optimizer) if self._optimizer else NO_OPTIMIZER)
            except Exception as caught:  # noqa: BLE001  # raised where backward ends
                error = caught
        self._error = self._error or error

    def _conclude(self, backward: Backward) -> None:
        backward.wait()
        self._raise()

    def _raise(self) -> None:
        """Raise what was kept until the model has ended its pass."""
        error, interruption = self._error, self._interruption
        self._error = self._interruption = None
        if interruption is not None and error is not None:
            raise interruption from error
        if interruption is not None:
            raise interruption
        if error is not None:
            raise error


def _hook(quantizer, bucket):  # without annotations: torch compares them with classes, and here they are text
    """Signal handlers wait; what they raise is raised when backward has ended."""
    taken: list = []
    while not taken:
        try:
            uninterrupted(lambda: taken.append(_taken(quantizer, bucket)))
        except BaseException as interruption:  # noqa: BLE001
            quantizer.interrupted(interruption)
    future, finish = taken[0]
    if finish is not None:
        finish()
    return future


def _taken(quantizer, bucket):
    """As `Quantizer.take`, but an error is raised by the second result."""
    try:
        return quantizer.take(bucket)
    except Exception as error:  # noqa: BLE001
        return None, functools.partial(_raised, error)


def _raised(error):
    raise error
