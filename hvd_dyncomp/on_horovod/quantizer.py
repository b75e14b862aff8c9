"""`DynamicQuantizer`: the `horovod.torch.Compressor` that users pass to `hvd.DistributedOptimizer`."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Literal

import torch

from hvd_dyncomp.checks import shown
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange.settings import Skip
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.on_horovod import horovod_optimizer
from hvd_dyncomp.on_horovod.session import OptimizerSession
from hvd_dyncomp.on_horovod.step_gradients import Context
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.advice import (
    ASSIGNED,
    FORGOTTEN,
    REDUCED_AGAIN,
    SPARSE,
)
from hvd_dyncomp.transport import given_or_horovod
from hvd_dyncomp.transport.base import Transport
from hvd_dyncomp.transport.horovod import Compressor

logger = logging.getLogger(__name__)


class DynamicQuantizer(OptimizerSession, Compressor):
    """Compress gradients to the controller's number of bits, with error feedback.

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    One quantizer serves one optimizer. It detects the optimizer at the first gradient, unless `attach` has set it.
    Several quantizers may share a controller. If a quantizer gets a tensor that is not a gradient of an optimizer
    (`hvd.allreduce(t, compression=...)`), it leaves the tensor uncompressed and warns once.

    Gradients may be float16, bfloat16, float32 or float64, of any shape and strides; quantization and sums are in
    float32. docs/design.md describes the exchange. At 2 bits or less, high momentum may harm training: `less_momentum`
    changes the optimizer's momentum in such steps.

    Args:
        controller: gives the number of bits. A policy or a level, such as 4, makes a new controller. Default:
            `Controller()`, the paper's `StepFunction()`, whose `step` needs an accuracy after each epoch.
        named_parameters: (name, parameter) pairs: the names in `state_dict`. For frameworks that make Horovod's
            optimizer without names.
        error_feedback: add the error of a quantization to the gradient of the next step. With more
            than two workers, a mean is quantized as well, and the error of that is kept, too. Without error feedback, a
            small value that shares a scale with values a hundred times as large may never arrive. False saves the
            residuals' 2 bytes per value; use False only at 8 bits or more.
        block_size: number of values in a block, a power of two from 64 to 65536. Buckets are divided among the workers
            in whole blocks. Below one bit, all values of a block share a scale, which costs 16 / block_size bits per
            value. From one bit on, at most 128 values share a scale, which costs 0.125 bit per value. A block_size of
            64 costs 0.25 bit per value; use it for gradients whose magnitudes differ much within 128 values.
        min_numel: tensors with fewer values (biases, batch norm) are sent at 8 bits if the level is lower. Change it
            for models with many small tensors.
        skip: a function of a parameter's name and the parameter. If it returns True, the parameter is sent
            uncompressed: `skip=lambda name, parameter: "embedding" in name`. It must return the same on all ranks. Use
            it for parameters that compression harms.
        bucket_bytes: size of a bucket, the gradients that are exchanged together, in bytes of float32. None: 8 MiB, or
            with more than 8 workers 1 MiB per worker, at most 128 MiB. Smaller buckets are sent earlier in backward.
            Larger buckets need fewer messages; use them on links with high latency.
        hierarchical: whether gradients are exchanged within each host first and then between hosts, so that the bytes
            that a host sends do not grow with its number of workers. None: yes, if there are several hosts with equally
            many workers, more than one each. False: no, gradients are exchanged among all workers at once, which was
            faster at 1 and 2 bits on two hosts of two workers and 1 Gbit/s.
        warmup_steps: number of steps at the start of training that use at least `warmup_bits`, whatever the
            controller's level. A warm-up does not protect a run at 2 bits or less: if the learning rate is large, the
            switch to fewer bits can itself make the run diverge. The step count is part of `state_dict`, so a run that
            resumes within its warm-up ends the warm-up at the same step.
        warmup_bits: lowest level during the warm-up, bits per value; 32 means uncompressed.
        transport: connects the ranks; default: Horovod. Pass a transport only in tests and simulations.

    Attributes:
        controller: see above.
        bits: level of the next step: that of the controller or of the warm-up.
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
        error_feedback: bool = True,
        block_size: int = 512,
        min_numel: int = 1024,
        skip: Skip | None = None,
        bucket_bytes: int | None = None,
        hierarchical: Literal[False] | None = None,
        warmup_steps: int = 0,
        warmup_bits: float = UNCOMPRESSED,
        transport: Transport | None = None,
        **unknown: Any,
    ) -> None:
        arguments: dict[str, Any] = {
            "error_feedback": error_feedback,
            "block_size": block_size,
            "min_numel": min_numel,
            "skip": skip,
            "bucket_bytes": bucket_bytes,
            "hierarchical": hierarchical,
            "warmup_steps": warmup_steps,
            "warmup_bits": warmup_bits,
        }
        super().__init__(controller, given_or_horovod(transport), named_parameters, **arguments, **unknown)
        self._arguments = {**arguments, "transport": transport}  # for a copy
        self._warned = False
        self._lock = threading.Lock()
        self._opaque = horovod_optimizer.opaque()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Bind the quantizer to an optimizer now, instead of at the first gradient.

        Args:
            optimizer: what `hvd.DistributedOptimizer(..., compression=this quantizer)` returned.

        Raises:
            ValueError: `optimizer` has another compressor, or is unusable (its `op`, or a parameter without a name), or
                gradients are in flight.
            RuntimeError: an error has ended a step.
        """
        if horovod_optimizer.compressor_of(optimizer) is not self:
            raise ValueError(
                "optimizer must be what hvd.DistributedOptimizer(..., compression=quantizer) returned for this "
                f"quantizer, got {shown(optimizer)}"
            )
        self._attach(optimizer)

    def compress(self, tensor: torch.Tensor | None = None) -> tuple[torch.Tensor, Context]:
        """Take a gradient from Horovod; return what Horovod is to reduce, and the context for `decompress`.

        A compressed gradient is sent by this package's own asynchronous collectives. In its place Horovod reduces a
        placeholder of one float32, until all ranks have detected their optimizers. This method never blocks, because
        Horovod calls it within backward.
        """
        if not isinstance(self, DynamicQuantizer):
            raise TypeError("compression must be a quantizer, not its class: write compression=DynamicQuantizer(4)")
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
        if horovod_optimizer.looked_into() is None:
            return self._timed(self._taken, tensor, sys._getframe(1))
        return self._opaque(self._timed, self._taken, tensor, sys._getframe(1))

    def _on_gradient(self, parameter: torch.Tensor) -> tuple[Callable, Context] | None:
        return self._timed(self._taken_directly, parameter)

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

    def _taken_directly(self, parameter: torch.Tensor) -> tuple[Callable, Context] | None:
        """Take a parameter's gradient, past Horovod, if it travels compressed; for `before_reduction`.

        It is so on all ranks or on none, or Horovod would wait: from the second step of all plans on.
        """
        optimizer = self._optimizer()
        if optimizer is not None and horovod_optimizer.stays_sparse(optimizer, parameter):
            self._warn_of_sparse(parameter)
            return None
        if optimizer is not None and (self._step is None or self._forgotten):
            self._open(optimizer, parameter)
        slot = self._slots.get(parameter) if self._direct else None
        if slot is None:
            return None
        gradient = horovod_optimizer.gradient_of(parameter)
        return horovod_optimizer.nothing, self._step_gradients.add_gradient(gradient, slot.name, parameter, slot)  # type: ignore[union-attr]  # there is a step

    def _warn_of_sparse(self, parameter: torch.Tensor) -> None:
        if parameter in self._slots and self._transport.rank == 0:
            self._advice.warn("sparse", SPARSE.format(self._slots[parameter].name))

    def _taken(self, gradient: torch.Tensor, caller: FrameType) -> tuple[torch.Tensor, Context]:
        found = self._searched(gradient, caller)
        if found is None:
            self._note_uncompressed(gradient)
            return gradient, Context(gradient)
        name, parameter = found
        return self._step_gradients.take_for_horovod(gradient, name, parameter, self._plan.slots.get(name))  # type: ignore[union-attr]

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
        """End a step, and warn of gradients that did not come from backward as they are."""
        if step is not self._step:
            raise RuntimeError(self._failure or FORGOTTEN)
        gradients = self._step_gradients
        self._await_agreement(step)
        self._end(step)
        self._step_gradients = None
        if gradients is None or self._plan is None or self._plan.source.rank != 0:
            return
        if self._reduced_again(step):
            if self._plan.slots and step.bits != UNCOMPRESSED:
                self._advice.warn("again", REDUCED_AGAIN)
        else:
            assigned = gradients.in_use and not step.from_backward_anywhere
            self._advice.warn("assigned", ASSIGNED if assigned else "")

    def _bits_of_means(self, step: Any) -> float | None:
        if step.from_backward_anywhere:
            return step.bits
        return None if self._reduced_again(step) else UNCOMPRESSED

    def _reduced_again(self, step: Any) -> bool:
        """Whether these are means, changed by the user, that came at the level before."""
        optimizer = self._optimizer()
        return not step.from_backward_anywhere and optimizer is not None and horovod_optimizer.synchronized(optimizer)

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
