"""`DynamicQuantizer`: the `horovod.torch.Compressor` that users pass to `hvd.DistributedOptimizer`."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NamedTuple, Unpack

import torch

from hvd_dyncomp.checks import shown
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange.slots import Slot
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.on_horovod.session import OptimizerSession
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import FORGOTTEN, REDUCED_AGAIN, SPARSE
from hvd_dyncomp.sessions.agreement import ATTACH, description, on_all_ranks
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.transport import given_or_horovod
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.horovod import Compressor

logger = logging.getLogger(__name__)


class Context(NamedTuple):
    """What `decompress` needs for one tensor.

    Attributes:
        gradient: the original, which receives the mean.
        step: None for a tensor that is no gradient of an optimizer.
        slot: the gradient's place, if it travels compressed.
    """

    gradient: torch.Tensor
    step: Step | None = None
    slot: Slot | None = None


class DynamicQuantizer(OptimizerSession, Compressor):
    """Compress gradients to the controller's number of bits, with error feedback.

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    One quantizer serves one optimizer. It detects the optimizer at the first gradient, unless `attach` has set it.
    Several quantizers may share a controller. If a quantizer gets a tensor that is not a gradient of an optimizer
    (`hvd.allreduce(t, compression=...)`), it leaves the tensor uncompressed and warns once.

    Gradients may be float16, bfloat16, float32 or float64, of any shape and strides; quantization and sums are in
    float32. At 2 bits or less, high momentum may harm training: `less_momentum` changes the optimizer's momentum in
    such steps.

    Args:
        controller: gives the number of bits. A policy or a level, such as 4, makes a new controller. Default:
            `Controller()`, the paper's `StepFunction()`, whose `step` needs an accuracy after each epoch.
        named_parameters: (name, parameter) pairs: the names in `state_dict`. For frameworks that make Horovod's
            optimizer without names.
        transport: connects the ranks; default: Horovod. Pass a transport only in tests and simulations.
        options: see `hvd_dyncomp.sessions.options.Options`.

    Attributes:
        controller: see above.
        bits: level of the next step: that of the controller or of the warm-up. The first step after a rise to 32 bits
            is sent at 16, and delivers the residuals.
        meter: the `Meter` of what this rank has sent.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type. At the first gradient: the optimizer's op
            is not Average or Sum, or another optimizer uses the same quantizer.
        LockstepError: from the optimizer's step (or `synchronize`), on every rank: the ranks have different parameters
            or settings, or differ in level or step. (If a program calls `synchronize` itself, and one rank is at 32
            bits while another one compresses, Horovod may raise an error of its own first.)

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
        transport: Transport | None = None,
        **options: Unpack[Options],
    ) -> None:
        super().__init__(controller, given_or_horovod(transport), named_parameters, **options)
        self._arguments = {**options, "transport": transport}  # for a copy
        self._warned = False
        self._lock = threading.Lock()
        self._opaque = horovod_optimizer.opaque()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Bind the quantizer to an optimizer now, instead of at the first gradient. Collective; blocks.

        Call it on all ranks that reduce with the optimizer, after `hvd.init()` and before training. Without it, Horovod
        reduces the gradients of the first step uncompressed. So a resumed run repeats the uninterrupted one bit for bit
        only with it. In elastic training, where ranks join while others train, this method is not collective, and
        Horovod reduces the first step after each change of ranks.

        Args:
            optimizer: what `hvd.DistributedOptimizer(..., compression=this quantizer)` returned.

        Raises:
            ValueError: `optimizer` has another compressor, or is unusable (its `op`, or a parameter without a name), or
                gradients are in flight; or the state that was loaded is of other parameters.
            RuntimeError: an error has ended a step.
            LockstepError: another rank has raised such an error, or has other parameters. On all ranks that have no
                error of their own.
        """
        ranks = self._transport.within(horovod_optimizer.process_set_of(optimizer))
        if ranks.changes:
            self._attach(self._checked(optimizer), None)
            return
        hosts = ranks.hosts()
        with on_all_ranks(ranks, ATTACH) as mine:
            self._attach(self._checked(optimizer), hosts)
            mine += description(self._source.named, values=False)  # type: ignore[union-attr]  # there is one now

    def _checked(self, optimizer: Any) -> torch.optim.Optimizer:
        """Raises: ValueError: the optimizer has another compressor."""
        if horovod_optimizer.compressor_of(optimizer) is not self:
            raise ValueError(
                "optimizer must be what hvd.DistributedOptimizer(..., compression=quantizer) returned for this "
                f"quantizer, got {shown(optimizer)}"
            )
        return optimizer

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Context]:
        """Take a gradient from Horovod; return what Horovod is to reduce, and the context for `decompress`.

        Horovod calls it for what travels uncompressed: compressed gradients are taken before they reach Horovod. This
        method never blocks, because Horovod calls it within backward.
        """
        if not isinstance(self, DynamicQuantizer):
            raise TypeError("compression must be a quantizer, not its class: write compression=DynamicQuantizer(4)")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
        if horovod_optimizer.looked_into() is None:
            return self._timed(self._taken, tensor, sys._getframe(1))
        return self._opaque(self._timed, self._taken, tensor, sys._getframe(1))

    def _on_gradient(self, parameter: torch.Tensor) -> tuple[Callable, Context] | None:
        return self._timed(self._add_past_horovod, parameter)

    def _timed(self, call: Callable, *arguments: Any) -> Any:
        began = time.perf_counter()
        with self._lock:  # backward has a thread for each device
            try:
                taken = call(*arguments)
            except BaseException as error:
                self._fail(error)
                raise
        if self._step is not None:
            self._step.traffic.seconds += time.perf_counter() - began
        return taken

    def _add_past_horovod(self, parameter: torch.Tensor) -> tuple[Callable, Context] | None:
        """Take a parameter's gradient, past Horovod, if it travels compressed; for `before_reduction`."""
        optimizer = self._optimizer()
        if optimizer is not None and horovod_optimizer.stays_sparse(optimizer, parameter):
            self._warn_of_sparse(parameter)
            return None
        if optimizer is not None and (self._step is None or self._forgotten):
            self._open(optimizer, parameter)
        slot, step = self._slots.get(parameter), self._step
        if slot is None or step is None or step.bits == UNCOMPRESSED:
            return None
        gradient = horovod_optimizer.gradient_of(parameter)
        step.add(slot, gradient)
        return horovod_optimizer.nothing, Context(gradient, step, slot)

    def _warn_of_sparse(self, parameter: torch.Tensor) -> None:
        if parameter in self._slots:
            self._advise("sparse", SPARSE.format(self._slots[parameter].name))

    def _taken(self, gradient: torch.Tensor, caller: FrameType) -> tuple[torch.Tensor, Context]:
        if not self._is_gradient(gradient, caller):
            self._note_uncompressed(gradient)
            return gradient, Context(gradient)
        step: Any = self._step  # there is one
        return step.uncompressed(gradient), Context(gradient, step)

    def decompress(self, tensor: torch.Tensor | None, ctx: Context | None) -> torch.Tensor:
        """Return the reduced gradient to Horovod, in the original's memory and dtype.

        Horovod passes all gradients of a step to `compress` before it asks for the first one back.

        Args:
            tensor: what Horovod has reduced; None for a compressed gradient of which it got nothing.
            ctx: what `compress` returned with it.
        """
        if ctx is not None and not isinstance(ctx, Context):
            raise TypeError(f"ctx must be what compress returned, got {shown(ctx)}")
        if not isinstance(tensor, torch.Tensor):
            if ctx is None or ctx.slot is None:
                raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
            tensor = ctx.gradient
        gradient, step, slot = ctx or Context(tensor)  # no ctx: `compress` never saw this sparse gradient
        if step is None:
            return tensor
        began = time.perf_counter()
        step.traffic.waited_seconds += began - self._entered  # by Horovod, for what it reduces itself
        try:
            if not step.over:
                self._collect(step)
            if slot is None and tensor is gradient:
                return tensor
            mean = step.relocated.get(id(gradient), gradient)
            if slot is None:
                mean.copy_(tensor)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self._entered = time.perf_counter()
        step.traffic.seconds += self._entered - began
        return mean

    @torch.no_grad()
    def _collect(self, step: Step) -> None:
        """End a step, and warn if its gradients were reduced before."""
        if step is not self._step:
            raise RuntimeError(self._failure or FORGOTTEN)
        self._end(step)
        if self._again and self._slots and self.bits != UNCOMPRESSED:
            self._advise("again", REDUCED_AGAIN)

    def __reduce__(self) -> tuple:
        """Copy (pickle, copy.deepcopy), between steps only. A copy has the same residuals and no optimizer."""
        if self._step is not None:
            raise RuntimeError("a DynamicQuantizer can be pickled between steps only, but gradients are in flight")
        if self._names is not None:
            raise TypeError(
                "a DynamicQuantizer with named_parameters cannot be pickled: the parameters belong to this process; "
                "pass the names to hvd.DistributedOptimizer instead"
            )
        return _copy, (self.controller, self._arguments, {**self.state_dict(), "rank": None})

    def _note_uncompressed(self, tensor: torch.Tensor) -> None:
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
