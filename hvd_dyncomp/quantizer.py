"""`DynamicQuantizer`: the `horovod.torch.Compressor` that users hand to `hvd.DistributedOptimizer`."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from numbers import Real
from types import FrameType
from typing import Any, NamedTuple

import torch

from hvd_dyncomp.auto_level import AutoLevel
from hvd_dyncomp.checks import integer, one_of, shown
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange import lookout, residual_state
from hvd_dyncomp.exchange.binding import names_by_parameter
from hvd_dyncomp.exchange.failed_step import FailedStep
from hvd_dyncomp.exchange.lifecycle import Failed, Lifecycle, Stepping
from hvd_dyncomp.exchange.plan import Plan
from hvd_dyncomp.exchange.relative_error import relative_errors
from hvd_dyncomp.exchange.settings import Settings, Skip
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.exchange.tally import count_outside
from hvd_dyncomp.exchange.uninterrupted import uninterrupted
from hvd_dyncomp.horovod_optimizer import compressor_of
from hvd_dyncomp.levels import UNCOMPRESSED, check_level
from hvd_dyncomp.meter import Meter
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.transport.base import Transport, gather_json
from hvd_dyncomp.transport.horovod import Compressor, HorovodTransport

logger = logging.getLogger(__name__)

# Not None where torch.compile looks into what this thread calls. To be opaque to it takes a microsecond and more, for
# every gradient. (Kept in no documentation; a torch without it has us opaque always.)
_looked_into = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


class _Context(NamedTuple):
    """All that `decompress` needs for one tensor."""

    gradient: torch.Tensor
    step: Step | FailedStep | None = None
    compressed: bool = False


class DynamicQuantizer(Compressor):
    """Compresses gradients to the number of bits that a controller says, with error feedback.

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    One quantizer serves one optimizer, which it finds by itself at the first gradient, or is told of by `attach`;
    several may share a controller. Handed to anything else (`hvd.allreduce(t, compression=...)`), a quantizer lets the
    tensor pass uncompressed and says so once.

    How gradients travel is told in docs/design.md. Gradients may be float16, bfloat16, float32 or float64,
    of any shape and strides; quantization and sums are done in float32. At 2 bits and less, what waits in residuals
    acts as a momentum: `without_momentum` has the optimizer step without its own.

    Args:
        controller: says at how many bits; default `Controller()`. A policy or a level, such as 4, makes one of its own.
        named_parameters: (name, parameter) pairs, if the names in `state_dict` are to be others than the optimizer's.
        error_feedback: carry what quantization loses into the next step, for both quantizations of a value. Without it,
            what shares a block with values a hundred times as large may never arrive.
        rounding: "nearest", or "stochastic": unbiased, reproducible from (seed, rank, step, element). 1 bit with error
            feedback always rounds to nearest.
        block_size: values that share a scale, a power of two from 64 to 65536; the scale costs 32 / block_size bits a
            value.
        min_numel: tensors of fewer values (biases, batch norm) travel at 8 bits where the level is less.
        skip: a function of a parameter's name and the parameter that says whether it travels uncompressed, too:
            `skip=lambda name, parameter: "embedding" in name`. The same answers on all ranks.
        fp16_uncompressed: tensors that are skipped travel as float16, as with `hvd.Compression.fp16`. (At 32 bits all
            others travel in their own dtype, whatever this says.)
        bucket_bytes: float32 bytes of gradients that are exchanged together.
        seed: for stochastic rounding.
        auto_level: take the controller's level as the least that quality allows, try the levels above it, 32 included,
            for some 50 steps at the start, and use whichever makes the steps shortest. What was measured is logged.
            Levels then depend on time, and a run cannot be repeated bit for bit.
        reprobe_epochs: with `auto_level`, epochs after which levels are tried again; so they are when the controller
            moves.
        hierarchical: on hosts of several workers, exchange gradients within each host first, and then between hosts, so
            that what leaves a host is what the level says, however many workers it has. None: where all hosts have
            equally many workers; True: demand it; False: all workers at once.
        warmup_steps: so many first steps have at least `warmup_bits`, whatever the controller says. Steps are counted
            as `state_dict` does, so that a run that resumes in its warm-up ends it where it would have ended.
        warmup_bits: see there; 32 for none compressed.
        transport: who carries the bytes; default Horovod. For tests and simulations.

    Attributes:
        controller: see above.
        bits: level of the latest step with `auto_level`; before the first, and always without it, that of the next: the
            controller's, but for the warm-up.
        meter: the `Meter` of what this rank has sent.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; at the first gradient: the optimizer's op
            is not Average or Sum, another optimizer uses the same quantizer, or `hierarchical=True` cannot be.
        LockstepError: from the optimizer's step (or `synchronize`), on every rank: the ranks have other parameters or
            settings, or disagree about level or step. (Who calls `synchronize` by himself may see Horovod's own error
            first, where a rank at 32 bits meets one that compresses.)

    Examples:
        >>> from hvd_dyncomp import Static
        >>> quantizer = DynamicQuantizer(Controller(Static(0.25)), warmup_steps=100, warmup_bits=4)
        >>> quantizer.bits, quantizer.controller.bits
        (4, 0.25)
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
        fp16_uncompressed: bool = False,
        bucket_bytes: int = 8 * 2**20,
        seed: int = 0,
        auto_level: bool = False,
        reprobe_epochs: int = 5,
        hierarchical: bool | None = None,
        warmup_steps: int = 0,
        warmup_bits: float = UNCOMPRESSED,
        transport: Transport | None = None,
    ) -> None:
        self._arguments = {key: value for key, value in locals().items() if key not in ("self", "controller")}
        self.controller = _controller(controller)
        self._settings = Settings(
            error_feedback,
            block_size,
            min_numel,
            bucket_bytes,
            fp16_uncompressed,
            auto_level,
            hierarchical,
        ).checked()
        if skip is not None and not callable(skip):
            raise TypeError(f"skip must be a function of name and parameter, got {shown(skip)}")
        stochastic = one_of("rounding", rounding, ("nearest", "stochastic")) == "stochastic"
        seed = integer("seed", seed, 0)
        self._seed = seed if stochastic else None
        self._warmup_steps = integer("warmup_steps", warmup_steps, 0)
        self._warmup_bits = check_level("warmup_bits", warmup_bits)
        names = None if named_parameters is None else names_by_parameter(named_parameters)
        self.meter = Meter()
        reprobe_epochs = integer("reprobe_epochs", reprobe_epochs, 1)
        self._auto = AutoLevel(reprobe_epochs) if auto_level else None
        self._transport = HorovodTransport() if transport is None else transport
        if not isinstance(self._transport, Transport):
            raise TypeError(f"transport must be a Transport, got {shown(transport)}")
        self._lifecycle = Lifecycle(self._settings, names, skip, self._transport)
        lookout.register(self.controller, self._lifecycle)
        self._lock = threading.Lock()
        # Where a compiled function calls backward, hooks are compiled as well, and what was found for one gradient
        # would be taken to be so of the next. Made here: it imports the compiler, as making any optimizer does.
        self._opaque = torch.compiler.disable(DynamicQuantizer._timed)
        self._steps = 0
        self._warned = False

    @property
    def bits(self) -> float:
        """See the class."""
        return self._demanded if self._auto is None or self._auto.bits is None else self._auto.bits

    @property
    def _demanded(self) -> float:
        """The least level of the next step, the same on all ranks."""
        bits = self.controller.bits
        return max(bits, self._warmup_bits) if self._steps < self._warmup_steps else bits

    def errors(self) -> dict[str, float]:
        """How far the latest step's means are off, by name as in `Meter.tensors`: error's norm over mean's.

        Estimated from what this rank owes, as if all owed as much, independently. (With more than two ranks to reduce
        among, the second quantization adds about as much again.) Below one bit what is owed waits for many steps, and
        may be more than the mean. To be called while there are gradients, before `zero_grad()`; waits for the device,
        and for no rank. Left out is what has no gradient, or is another worker's of this host to quantize; without
        error feedback, everything.
        """
        plan = self._lifecycle.plan
        return {} if plan is None else relative_errors(plan)

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Says which optimizer to work for, instead of having it found at the first gradient.

        Args:
            optimizer: what `hvd.DistributedOptimizer(..., compression=this quantizer)` returned.

        Raises:
            ValueError: it is another optimizer, or cannot be used: its `op`, or a parameter without a name; gradients
                are in flight.
        """
        if compressor_of(optimizer) is not self:
            raise ValueError(
                "optimizer must be what hvd.DistributedOptimizer(..., compression=quantizer) returned for this "
                f"quantizer, got {shown(optimizer)}"
            )
        uninterrupted(lambda: self._lifecycle.attach(optimizer))

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, _Context]:
        """Called by Horovod for every gradient; returns what Horovod is to reduce, and the context for `decompress`.

        A compressed gradient travels by this package's own asynchronous collectives. Horovod is left a ticket of one
        float32 to reduce, so that its bookkeeping goes on. Never blocks: it is called within backward.
        """
        if not isinstance(self, DynamicQuantizer):
            raise TypeError("compression must be a quantizer, not its class: write compression=DynamicQuantizer()")
        take = DynamicQuantizer._timed if _looked_into() is None else self._opaque
        caller = sys._getframe(1)
        if torch.is_inference_mode_enabled():  # `step` may be called in it: what it makes cannot be written later
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
        found = self._lifecycle.whose(self, tensor, caller, self._give_up)
        if isinstance(self._lifecycle.state, Failed):
            failed = self._lifecycle.state.step
            return failed.pass_on(tensor), _Context(tensor, failed)
        if found is None:
            self._note_uncompressed(tensor)
            return tensor, _Context(tensor)
        name, parameter = found
        state = self._lifecycle.state
        in_flight = isinstance(state, Stepping) and not state.forgotten
        step = state.step if in_flight else uninterrupted(self._begin)  # type: ignore[union-attr]  # it is Stepping
        wire, gradient, compressed = step.take(tensor, name, parameter)
        return wire, _Context(gradient, step, compressed)

    def decompress(self, tensor: torch.Tensor, ctx: _Context | None) -> torch.Tensor:
        """Called by Horovod with what it reduced; returns the reduced gradient, in the original's memory and dtype.

        Horovod has handed in all gradients of a step before it asks for the first one back.
        """
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
        if ctx is not None and not isinstance(ctx, _Context):
            raise TypeError(f"ctx must be what compress returned, got {shown(ctx)}")
        gradient, step, compressed = ctx or _Context(tensor)  # compress never sees a gradient that stays sparse
        if step is None:
            return tensor
        began = time.perf_counter()
        if not step.over:
            with torch.inference_mode(False), torch.no_grad():
                uninterrupted(lambda: self._collect(step))
        if isinstance(step, FailedStep):  # it has raised
            return tensor
        if self._auto is not None:
            self._auto.learn(step.proposal)
        if not compressed:
            if tensor is not gradient:
                gradient.copy_(tensor)
        elif not tensor.item():  # a ticket, on the CPU but in groups
            gradient.zero_()  # nobody has used this parameter: not even rounding may move it
        step.traffic.seconds += time.perf_counter() - began
        return gradient

    def _collect(self, step: Step | FailedStep) -> None:
        self._lifecycle.end(step)
        step.collect()
        self._lifecycle.collected(step)

    def drop_residuals(self) -> None:
        """Forgets what has not been delivered yet: for who throws away the gradients of a step.

        To be called on every rank, between steps: after `optimizer.synchronize()` or `optimizer.step()`.

        Raises:
            RuntimeError: gradients are in flight; nothing has changed then.
        """
        if isinstance(self._lifecycle.state, Stepping):
            raise RuntimeError("drop_residuals must be called between steps, but gradients are in flight")
        self._lifecycle.forget()

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, the step count and the meter. Save one per rank, between steps.

        Contains tensors, numbers, strings, lists and dicts only.
        """
        # Last: what is owed may be a state that was loaded, whole, and these have moved on since.
        return {
            **self._lifecycle.debts(),
            "steps": self._steps,
            "meter": self.meter.state_dict(),
            "auto_level": self._auto and self._auto.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of the same rank of a run with the same parameters.

        May be called before the first gradient; what concerns parameters is then checked at the first gradient.

        Raises:
            ValueError: the state is not a quantizer's, or is another rank's, or of other parameters; nothing has
                changed then.
        """
        try:
            state = residual_state.checked(state)
            if state.get("spending") is not None:
                raise ValueError('it was saved with allocation="error", which there is no more')
            steps = integer("steps", state["steps"], 0)
            Meter().load_state_dict(state["meter"])
            if state.get("auto_level"):
                AutoLevel(1).load_state_dict(state["auto_level"])
        except Exception as error:  # a file may have brought anything
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"state must come from DynamicQuantizer.state_dict(), got {shown(state)}: {cause}"
            ) from error
        self._lifecycle.load(state)
        if self._auto is not None and state.get("auto_level"):
            self._auto.load_state_dict(state["auto_level"])
        self._steps = steps
        self.meter.load_state_dict(state["meter"])

    def sync(self) -> None:
        """Takes over what rank 0 knows: for workers that join a run (`hvd_dyncomp.elastic`). Collective.

        Residuals are each rank's own: a worker that joins owes nothing.
        """
        self._lifecycle.suspend()
        mine = {"steps": self._steps, "auto_level": self._auto and self._auto.state_dict()}
        first = gather_json(self._transport, mine, "hvd_dyncomp.quantizer.sync")[0]
        self._steps = first["steps"]
        if self._auto is not None and first["auto_level"]:
            self._auto.load_state_dict(first["auto_level"])

    def __reduce__(self) -> tuple:
        """A copy (pickle, copy.deepcopy) is unbound and owes what this one owes. Between steps only."""
        if isinstance(self._lifecycle.state, Stepping):
            raise RuntimeError("a DynamicQuantizer can be pickled between steps only, but gradients are in flight")
        if self._arguments["named_parameters"] is not None:
            raise TypeError(
                "a DynamicQuantizer with named_parameters cannot be pickled: they are this process's own; hand them to "
                "hvd.DistributedOptimizer instead"
            )
        return _copy, (self.controller, self._arguments, {**self.state_dict(), "rank": None})

    def _give_up(self, error: Exception, transport: Transport, label: str) -> FailedStep:
        return FailedStep(
            error,
            transport=transport,
            label=label,
            number=self._steps,
            bits=self.bits,
        )

    def _begin(self) -> Step:
        """A new step."""
        plan: Plan = self._lifecycle.plan  # type: ignore[assignment]  # whose gradient it is was known
        previous = self._lifecycle.leave()
        if previous is not None and isinstance(self._lifecycle.state, Stepping):
            self._steps = previous.number  # which it was not: whoever has collected it will differ in this one
        # A process set of one worker has nobody to send to.
        bits = self._demanded if plan.binding.world_size > 1 else UNCOMPRESSED
        if self._auto is not None:
            bits = self._auto.begin_step(bits, self.controller.epoch, time.monotonic())
        step = Step(
            plan,
            bits=bits,
            proposal=self._auto.verdict if self._auto is not None else 0,
            number=self._steps,
            seed=self._seed,
            fresh=plan.binding.begin_step(),
            epoch=self.controller.epoch,
            meter=self.meter,
            previous=previous,
        )
        self._steps += 1
        self._lifecycle.begin(step)
        return step

    def _note_uncompressed(self, tensor: torch.Tensor) -> None:
        count_outside(tensor, self.meter.at(self.controller.epoch, UNCOMPRESSED), self._transport)
        if not self._warned:
            self._warned = True
            logger.warning(
                "DynamicQuantizer compresses the gradients of an optimizer only; a tensor of shape %s that "
                "was passed outside one travels uncompressed",
                tuple(tensor.shape),
            )


def _controller(given: Any) -> Controller:
    if isinstance(given, Controller):
        return given
    if isinstance(given, Real) and not isinstance(given, bool):
        given = check_level("controller", given)
    elif given is not None and not isinstance(given, Policy):
        raise TypeError(f"controller must be a Controller, a Policy or a level, got {shown(given)}")
    return Controller(given)


def _copy(controller: Controller, arguments: dict[str, Any], state: dict[str, Any]) -> DynamicQuantizer:
    quantizer = DynamicQuantizer(controller, **arguments)
    quantizer.load_state_dict(state)
    return quantizer
