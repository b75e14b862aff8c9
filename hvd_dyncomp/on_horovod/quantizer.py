"""`DynamicQuantizer`: the `horovod.torch.Compressor` that users pass to `hvd.DistributedOptimizer`."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch

from hvd_dyncomp import replicas
from hvd_dyncomp.checks import one_of, shown
from hvd_dyncomp.controller import Controller, controller_from
from hvd_dyncomp.exchange import residual_state
from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.residual_state import relative_errors
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.tally import count_outside
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.on_horovod.gradients import names_by_parameter
from hvd_dyncomp.on_horovod.horovod_optimizer import compressor_of
from hvd_dyncomp.on_horovod.lifecycle import Lifecycle
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.step_levels import StepLevels
from hvd_dyncomp.transport import given_or_horovod
from hvd_dyncomp.transport.base import Transport, gather_json
from hvd_dyncomp.transport.horovod import Compressor

logger = logging.getLogger(__name__)

# Returns not None while torch.compile traces this thread. To be opaque to it costs a microsecond and more for every
# gradient. (Not documented by torch; with a torch that lacks it, `bool` makes us opaque always.)
_looked_into = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


class _Context(NamedTuple):
    """What `decompress` needs for one tensor."""

    gradient: torch.Tensor
    step: Step | FailedStep | None = None
    compressed: bool = False


class DynamicQuantizer(Compressor):
    """Compress gradients to the controller's number of bits, with error feedback.

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    One quantizer serves one optimizer. It finds the optimizer by itself at the first gradient, or `attach` names it.
    Several quantizers may share a controller. Used for anything else (`hvd.allreduce(t, compression=...)`), a quantizer
    leaves the tensor uncompressed and warns once.

    Gradients may be float16, bfloat16, float32 or float64, of any shape and strides; quantization and sums are in
    float32. docs/design.md describes the exchange. At 2 bits and less the residuals act as a momentum:
    `without_momentum` makes the optimizer step without its own.

    Args:
        controller: gives the number of bits; default `Controller()`. A policy or a level, such as 4, makes a new
            controller.
        named_parameters: (name, parameter) pairs: the names in `state_dict`. For frameworks that make Horovod's
            optimizer without names.
        error_feedback: carry what quantization loses into the next step, for both quantizations of a value. Without it,
            a small value that shares a block with values a hundred times as large may never arrive. False saves the
            residuals' 2 bytes per value; use it at 8 bits and more only.
        rounding: "nearest" or "stochastic". Stochastic rounding is unbiased and reproducible from rank, step and
            element. Use it for training without error feedback. 1 bit with error feedback always rounds to nearest.
        block_size: values that share a scale, a power of two from 64 to 65536. The scale costs 32 / block_size bits per
            value. Change it for gradients whose magnitudes differ much within 512 values.
        min_numel: tensors of fewer values (biases, batch norm) travel at 8 bits where the level is lower. Change it for
            models with many small tensors.
        skip: a function of a parameter's name and the parameter. If it returns True, the parameter travels
            uncompressed: `skip=lambda name, parameter: "embedding" in name`. It must return the same on all ranks. Use
            it for parameters that compression harms.
        fp16_skipped: send skipped tensors as float16, as `hvd.Compression.fp16` does. Use it for large skipped
            tensors on a slow link. (At 32 bits all other tensors travel in their own dtype, with either value.)
        bucket_bytes: float32 bytes of gradients that are exchanged together. Smaller buckets leave earlier in backward.
            Larger ones need fewer messages; use them on links of long latency.
        auto_level: treat the controller's level as the least that quality allows. Try the levels above it, 32 included,
            for some 50 steps at the start, again whenever the controller moves, and every five epochs; then use the
            level with the shortest steps. The measurements are logged. Use it on links of unknown speed. Levels then
            depend on time, so a run cannot be repeated bit for bit.
        hierarchical: on hosts of several workers, exchange gradients within each host first, then between hosts. What
            leaves a host is then what the level says, however many workers it has. None: where all hosts have equally
            many workers. False: exchange among all workers at once, which was faster at 1 and 2 bits on two hosts of
            two workers and 1 Gbit/s.
        discardable: keep a copy of the residuals of the step before, 2 bytes per value, so that `discard` can undo a
            step. Use it if your program throws exchanged gradients away.
        warmup_steps: number of first steps that have at least `warmup_bits`, whatever the controller says. It does not
            protect a run at 2 bits or less: if the learning rate is large, the switch itself can make it diverge. Steps
            count as in `state_dict`, so a run that resumes within its warm-up ends it at the same step.
        warmup_bits: least level of the warm-up, bits per value; 32 means uncompressed.
        transport: sends the bytes; default Horovod. For tests and simulations.

    Attributes:
        controller: see above.
        bits: level of the next step: the controller's, or the warm-up's. With `auto_level`, from the first step on,
            level of the latest step.
        meter: the `Meter` of what this rank has sent.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type. At the first gradient: the optimizer's op
            is not Average or Sum, or another optimizer uses the same quantizer.
        LockstepError: from the optimizer's step (or `synchronize`), on every rank: the ranks have other parameters or
            settings, or differ in level or step. (If a program calls `synchronize` itself and a rank at 32 bits meets
            one that compresses, Horovod's own error may come first.)

    Examples:
        >>> quantizer = DynamicQuantizer(4, warmup_steps=100, warmup_bits=8)
        >>> quantizer.bits, quantizer.controller.bits
        (8, 4)
        >>> quantizer.meter.total().sent_bytes
        0.0
    """

    def __init__(
        self,
        controller: Controller | Policy | float | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        error_feedback: bool = True,
        rounding: str = "nearest",
        block_size: int = 512,
        min_numel: int = 1024,
        skip: Skip | None = None,
        fp16_skipped: bool = False,
        bucket_bytes: int = 8 * 2**20,
        auto_level: bool = False,
        hierarchical: Literal[False] | None = None,
        discardable: bool = False,
        warmup_steps: int = 0,
        warmup_bits: float = UNCOMPRESSED,
        transport: Transport | None = None,
    ) -> None:
        self._arguments = {key: value for key, value in locals().items() if key not in ("self", "controller")}
        self.controller = controller_from(controller, transport)
        settings = Settings(**{field.name: self._arguments[field.name] for field in dataclasses.fields(Settings)})
        if skip is not None and not callable(skip):
            raise TypeError(f"skip must be a function of name and parameter, got {shown(skip)}")
        names = None if named_parameters is None else names_by_parameter(named_parameters)
        self._transport = given_or_horovod(transport)
        self.meter = Meter()
        self._levels = StepLevels(
            self.controller, warmup_steps=warmup_steps, warmup_bits=warmup_bits, auto_level=settings.auto_level
        )
        self._lifecycle = Lifecycle(
            settings,
            names,
            skip,
            self._transport,
            levels=self._levels,
            meter=self.meter,
            stochastic=one_of("rounding", rounding, ("nearest", "stochastic")) == "stochastic",
        )
        replicas.register(self.controller, self._lifecycle)
        self._lock = threading.Lock()
        # A compiled function that calls backward compiles the hooks, too, and would reuse for the next gradient what
        # it found for this one. Made here: it imports the compiler, as making any optimizer does.
        self._opaque = torch.compiler.disable(DynamicQuantizer._timed)
        self._warned = False

    @property
    def bits(self) -> float:
        """Level of the next step, or with `auto_level` of the latest one; see the class."""
        return self._levels.bits

    def relative_errors(self) -> dict[str, float]:
        """Estimated error of the latest step's means, relative to their norms, by name as in `Meter.tensors`.

        Call it while there are gradients, before `zero_grad()`. It waits for the device, and for no rank.

        The estimate takes this rank's residuals, as if all ranks had as much, independently. (With more than two ranks
        to reduce among, the second quantization adds about as much again.) Below one bit a residual waits for many
        steps, and may be larger than the mean. Left out are tensors without a gradient, and tensors that another worker
        of this host quantizes; without error feedback, all tensors.
        """
        plan = self._lifecycle.plan
        return {} if plan is None else relative_errors(plan.buckets, plan.source.named, plan.source.factor)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Bind the quantizer to an optimizer now, instead of at the first gradient.

        Args:
            optimizer: what `hvd.DistributedOptimizer(..., compression=this quantizer)` returned.

        Raises:
            ValueError: `optimizer` has another compressor, or is unusable (its `op`, or a parameter without a name), or
                gradients are in flight.
        """
        if compressor_of(optimizer) is not self:
            raise ValueError(
                "optimizer must be what hvd.DistributedOptimizer(..., compression=quantizer) returned for this "
                f"quantizer, got {shown(optimizer)}"
            )
        uninterrupted(lambda: self._lifecycle.attach(optimizer))

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, _Context]:
        """Take a gradient from Horovod; return what Horovod is to reduce, and the context for `decompress`.

        A compressed gradient travels by this package's own asynchronous collectives. In its place Horovod reduces a
        ticket of one float32, so that its bookkeeping goes on. Never blocks: Horovod calls it within backward.
        """
        if not isinstance(self, DynamicQuantizer):
            raise TypeError("compression must be a quantizer, not its class: write compression=DynamicQuantizer()")
        take = DynamicQuantizer._timed if _looked_into() is None else self._opaque
        caller = sys._getframe(1)
        if torch.is_inference_mode_enabled():  # `step` may be called in it: tensors made in it cannot be written later
            with torch.inference_mode(False), torch.no_grad():
                return take(self, tensor, caller)
        return take(self, tensor, caller)

    def _timed(self, tensor: torch.Tensor | None, caller: FrameType) -> tuple[torch.Tensor, _Context]:
        began = time.perf_counter()
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
        with self._lock:  # backward has a thread for each device
            wire, context = self._compress(tensor, caller)
        if context.step is not None and not isinstance(context.step, FailedStep):
            context.step.traffic.seconds += time.perf_counter() - began
        return wire, context

    def _compress(self, tensor: torch.Tensor, caller: FrameType) -> tuple[torch.Tensor, _Context]:
        found = self._lifecycle.take(self, tensor, caller)
        if found is None:
            self._note_uncompressed(tensor)
            return tensor, _Context(tensor)
        (wire, gradient, compressed), step = found
        return wire, _Context(gradient, step, compressed)

    def decompress(self, tensor: torch.Tensor, ctx: _Context | None) -> torch.Tensor:
        """Return the reduced gradient to Horovod, in the original's memory and dtype.

        Horovod passes all gradients of a step to `compress` before it asks for the first one back.

        Args:
            tensor: what Horovod has reduced.
            ctx: what `compress` returned with it.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
        if ctx is not None and not isinstance(ctx, _Context):
            raise TypeError(f"ctx must be what compress returned, got {shown(ctx)}")
        gradient, step, compressed = ctx or _Context(tensor)  # no ctx: `compress` never saw this sparse gradient
        if step is None:
            return tensor
        began = time.perf_counter()
        if not step.over:
            with torch.inference_mode(False), torch.no_grad():
                uninterrupted(lambda: self._lifecycle.collect(step))
        if isinstance(step, FailedStep):  # it has raised
            return tensor
        if not compressed and tensor is gradient:
            return tensor
        mean = step.memory(gradient)
        if not compressed:
            mean.copy_(tensor)
        elif not tensor.item():  # a ticket; on the CPU unless gradients are grouped
            step.leave(gradient)  # no rank has used this parameter: not even rounding may move it
        step.traffic.seconds += time.perf_counter() - began
        return mean

    def discard(self) -> None:
        """Make the residuals what they were before the latest step, whose gradients the program throws away.

        Otherwise a part of them arrives with later gradients, and what they delivered of earlier ones is lost. Call it
        on every rank, after `optimizer.synchronize()` and instead of `optimizer.step()`. A second call has no effect.

        Raises:
            RuntimeError: gradients are in flight, or the quantizer was made without `discardable=True`; nothing has
                changed.
        """
        if self._lifecycle.in_flight:
            raise RuntimeError("discard must be called between steps, but gradients are in flight")
        self._lifecycle.discard()

    def check_replicas(self) -> None:
        """Check that all ranks hold the same parameters, bit for bit. Collective: every rank calls it, between steps.

        `Controller.step` does it, too: this is for programs that do not call it, or whose optimizer has a process set.

        Raises:
            LockstepError: a parameter differs, or a rank has not trained yet; on every rank.
        """
        self._lifecycle.check_replicas()

    def drop_residuals(self) -> None:
        """Drop all residuals: for a run that begins anew, such as another fold of a cross-validation.

        Call it on every rank, between steps: after `optimizer.synchronize()` or `optimizer.step()`.

        Raises:
            RuntimeError: gradients are in flight; nothing has changed.
        """
        if self._lifecycle.in_flight:
            raise RuntimeError("drop_residuals must be called between steps, but gradients are in flight")
        self._lifecycle.forget()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, the step count and the meter. Save one per rank, between steps.

        It holds only tensors, numbers, strings, lists and dicts.
        """
        # These last: `residuals()` may return a whole loaded state, and steps and meter have moved on since.
        return {**self._lifecycle.residuals(), **self._levels.state_dict(), "meter": self.meter.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the state of the same rank of a run with the same parameters.

        You may call it before the first gradient. What concerns parameters is then checked at the first gradient.

        Raises:
            ValueError: `state` is not a quantizer's, or belongs to another rank or other parameters; nothing has
                changed.
        """
        try:
            state = residual_state.checked(state)
            if state.get("spending") is not None:
                raise ValueError('it was saved with allocation="error", which no longer exists')
            StepLevels.check(state)
            Meter().load_state_dict(state["meter"])
        except Exception as error:  # a file may contain anything
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"state must come from DynamicQuantizer.state_dict(), got {shown(state)}: {cause}"
            ) from error
        self._lifecycle.load(state)
        self._levels.load_state_dict(state)
        self.meter.load_state_dict(state["meter"])

    def sync(self) -> None:
        """Take over rank 0's step count and `auto_level`: for workers that join (`elastic`). Collective.

        Residuals belong to each rank: a worker that joins has none.
        """
        self._lifecycle.suspend()
        [first, *_] = gather_json(self._transport, self._levels.state_dict(), "hvd_dyncomp.quantizer.sync")
        self._levels.load_state_dict(first)

    def __reduce__(self) -> tuple:
        """Copy (pickle, copy.deepcopy), between steps only. A copy has the same residuals and no optimizer."""
        if self._lifecycle.in_flight:
            raise RuntimeError("a DynamicQuantizer can be pickled between steps only, but gradients are in flight")
        if self._arguments["named_parameters"] is not None:
            raise TypeError(
                "a DynamicQuantizer with named_parameters cannot be pickled: the parameters belong to this process; "
                "pass the names to hvd.DistributedOptimizer instead"
            )
        return _copy, (self.controller, self._arguments, {**self.state_dict(), "rank": None})

    def _note_uncompressed(self, tensor: torch.Tensor) -> None:
        count_outside(tensor, self.meter.at(self.controller.epoch, UNCOMPRESSED), self._transport)
        if not self._warned:
            self._warned = True
            logger.warning(
                "DynamicQuantizer compresses only the gradients of an optimizer; a tensor of shape %s from outside an "
                "optimizer travels uncompressed",
                tuple(tensor.shape),
            )


def _copy(controller: Controller, arguments: dict[str, Any], state: dict[str, Any]) -> DynamicQuantizer:
    quantizer = DynamicQuantizer(controller, **arguments)
    quantizer.load_state_dict(state)
    return quantizer
