"""`DynamicQuantizer`: the `horovod.torch.Compressor` that users hand to `hvd.DistributedOptimizer`."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any, NamedTuple

import torch

from hvd_dyncomp.auto_level import AutoLevel
from hvd_dyncomp.checks import boolean, choice, shown, whole
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.exchange import residuals
from hvd_dyncomp.exchange.binding import calling_optimizer, names_by_parameter
from hvd_dyncomp.exchange.plan import Plan, Settings, agree
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.levels import UNCOMPRESSED
from hvd_dyncomp.meter import Meter, allreduce_bytes
from hvd_dyncomp.transport import horovod as comm
from hvd_dyncomp.transport.horovod import Compressor, rank_and_size

logger = logging.getLogger(__name__)


class _Context(NamedTuple):
    """All that `decompress` needs for one tensor."""

    gradient: torch.Tensor
    step: Step | None = None
    compressed: bool = False


class DynamicQuantizer(Compressor):
    """Compresses gradients to the number of bits that a controller says, with error feedback.

        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    One quantizer serves one optimizer, which it finds by itself; several quantizers may share a controller. Handed to
    anything else (`hvd.allreduce(t, compression=...)`), it lets the tensor pass uncompressed and says so once.

    How gradients travel is told in `hvd_dyncomp.exchange.base`. Gradients may be float16, bfloat16, float32 or float64,
    of any shape and strides; quantization and sums are done in float32.

    Args:
        controller: says at how many bits; default `Controller()`.
        named_parameters: (name, parameter) pairs, if the names in `state_dict` are to be others than the optimizer's.
        error_feedback: carry what quantization loses into the next step, for both quantizations of a value.
        rounding: "nearest", or "stochastic": unbiased, reproducible from (seed, rank, step, element).
        block_size: values that share a scale, a power of two from 64 to 65536; the scale costs 32 / block_size bits a
            value.
        min_numel: tensors of fewer values (biases, batch norm) travel uncompressed.
        bucket_bytes: float32 bytes of gradients that are exchanged together.
        seed: for stochastic rounding.
        auto_level: take the controller's level as the least that quality allows, try the levels above it, 32 included,
            for some 50 steps at the start, and use whichever makes the steps shortest. What was measured is logged.
            Levels then depend on time, and a run cannot be repeated bit for bit.
        reprobe_epochs: with `auto_level`, epochs after which levels are tried again; so they are when the controller
            moves.

    Attributes:
        controller: see above.
        bits: level of the latest step; the controller's before the first, and always without `auto_level`.
        meter: the `Meter` of what this rank has sent.

    Raises:
        ValueError, TypeError: an argument is out of range or of another type; at the first gradient: the optimizer's op
            is not Average or Sum, or a second optimizer uses the same quantizer.
        LockstepError: at the first gradient, on every rank: the ranks have other parameters or settings; later, from
            the optimizer's step: they disagree about level or step. (Where a rank at 32 bits meets one that compresses,
            Horovod's own error may come first.)
    """

    def __init__(
        self,
        controller: Controller | None = None,
        *,
        named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
        error_feedback: bool = True,
        rounding: str = "nearest",
        block_size: int = 512,
        min_numel: int = 1024,
        bucket_bytes: int = 8 * 2**20,
        seed: int = 0,
        auto_level: bool = False,
        reprobe_epochs: int = 5,
    ) -> None:
        self.controller = Controller() if controller is None else controller
        if not isinstance(self.controller, Controller):
            raise TypeError(f"controller must be a Controller, got {shown(controller)}")
        self._settings = Settings(
            error_feedback=boolean("error_feedback", error_feedback),
            block_size=whole("block_size", block_size, 64, 65536),
            min_numel=whole("min_numel", min_numel, 1),
            bucket_bytes=whole("bucket_bytes", bucket_bytes, 1),
        )
        if self._settings.block_size & (self._settings.block_size - 1):
            raise ValueError(f"block_size must be a power of two from 64 to 65536, got {shown(block_size)}")
        stochastic = choice("rounding", rounding, ("nearest", "stochastic")) == "stochastic"
        seed = whole("seed", seed, 0)
        self._seed = seed if stochastic else None
        self._names = None if named_parameters is None else names_by_parameter(named_parameters)
        self.meter = Meter()
        reprobe_epochs = whole("reprobe_epochs", reprobe_epochs, 1)
        self._auto = AutoLevel(reprobe_epochs) if boolean("auto_level", auto_level) else None
        self._steps = 0
        self._plan: Plan | None = None
        self._step: Step | None = None
        self._loaded: Mapping[str, Any] | None = None
        self._unsettled = False  # the ranks may have come apart: compare before the next step
        self._callers: set[CodeType] = set()
        self._warned = False

    @property
    def bits(self) -> int:
        """See the class."""
        return self.controller.bits if self._auto is None or self._auto.bits is None else self._auto.bits

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, _Context]:
        """Called by Horovod for every gradient; returns what Horovod is to reduce, and the context for `decompress`.

        A compressed gradient travels by this package's own asynchronous collectives. Horovod is left a ticket of one
        float32 to reduce, so that its bookkeeping goes on.
        """
        began = time.perf_counter()
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"tensor must be a torch.Tensor, got {shown(tensor)}")
        name = self._name_of(tensor)
        if name is None or self._plan is None:
            self._note_uncompressed(tensor)
            return tensor, _Context(tensor)
        # A gradient that comes a second time belongs to a new step: the old one was given up after an error, for
        # instance because a worker died; who is there now has to introduce itself.
        if self._step is None or name in self._step.submitted:
            if self._step is not None or self._unsettled or self._plan.binding.outdated:
                self._bind(self._plan.binding.optimizer)
            self._step = self._begin_step(self._plan)
        step, slot = self._step, self._plan.slots.get(name)
        step.submitted.add(name)
        if slot is None or step.bits == UNCOMPRESSED:
            wire, context = step.pass_uncompressed(tensor, slot), _Context(tensor, step)
        else:
            wire, context = step.add(tensor, slot), _Context(tensor, step, True)
        step.traffic.seconds += time.perf_counter() - began
        return wire, context

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
        if self._step is step:
            self._step = None
        step.collect()
        if self._auto is not None:
            self._auto.learn(step.choice)
        if not compressed and tensor is not gradient:
            gradient.copy_(tensor)
        step.traffic.seconds += time.perf_counter() - began
        return gradient

    def state_dict(self) -> dict[str, Any]:
        """This rank's residuals by parameter name, the step count and the meter. Save one per rank, between steps.

        Contains tensors, numbers, strings, lists and dicts only.
        """
        if self._loaded is not None:
            return dict(self._loaded)
        binding = self._plan.binding if self._plan else None
        return {
            "steps": self._steps,
            "rank": binding.rank if binding else 0,
            "world_size": binding.world_size if binding else 1,
            "factor": binding.factor if binding else 1.0,
            "meter": self.meter.state_dict(),
            "auto_level": self._auto and self._auto.state_dict(),
            **residuals.export(self._plan.buckets if self._plan else []),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state of the same rank of a run with the same parameters.

        May be called before the first gradient; what concerns parameters is then checked at the first gradient.

        Raises:
            ValueError: the state is not a quantizer's, or is another rank's, or of other parameters; nothing has
                changed then.
        """
        try:
            state = residuals.checked(state)
            steps, meter = whole("steps", state["steps"], 0), Meter()
            meter.load_state_dict(state["meter"])
            if state.get("auto_level"):
                AutoLevel(1).load_state_dict(state["auto_level"])
        except (KeyError, TypeError, ValueError) as error:
            cause = f"{type(error).__name__}: {error}"
            raise ValueError(
                f"state must come from DynamicQuantizer.state_dict(), got {shown(state)}: {cause}"
            ) from error
        if self._plan is not None:
            residuals.check(self._plan.buckets, state, self._plan.binding.rank, self._plan.binding.world_size)
        if self._auto is not None and state.get("auto_level"):
            self._auto.load_state_dict(state["auto_level"])
        self._loaded, self._unsettled = state, True
        self._step = None
        self._steps = steps
        self.meter.records = meter.records

    def sync(self) -> None:
        """Takes over what rank 0 knows: for workers that join a run (`hvd_dyncomp.elastic`). Collective.

        Residuals are each rank's own: a worker that joins owes nothing.
        """
        mine = {"steps": self._steps, "auto_level": self._auto and self._auto.state_dict()}
        first = comm.gather_json(mine, "hvd_dyncomp.quantizer.sync")[0]
        self._steps, self._unsettled, self._step = first["steps"], True, None
        if self._loaded is not None:
            self._loaded = {**self._loaded, "steps": self._steps, "rank": None}
        if self._auto is not None and first["auto_level"]:
            self._auto.load_state_dict(first["auto_level"])

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        """Name of the parameter whose gradient this is. Binds to the calling optimizer when it is first needed."""
        caller, plan = sys._getframe(2).f_code, self._plan
        if plan is not None and caller in self._callers:
            name = plan.binding.name_of_gradient(tensor)
            if name is not None:
                return name
        # The first gradient, one that Horovod has made dense, or a tensor that came from elsewhere.
        optimizer, parameter = calling_optimizer(self)
        if optimizer is None:
            return None
        if plan is None:
            plan = self._bind(optimizer)
        elif plan.binding.optimizer is not optimizer:
            raise ValueError(
                "a DynamicQuantizer works for one optimizer, and this one has another already; "
                "make one DynamicQuantizer per optimizer (they may share a controller)"
            )
        self._callers.add(caller)
        # Horovod makes sparse gradients dense on the way; the tensor is then nobody's .grad.
        name = plan.binding.name_of_gradient(tensor)
        return name if name is not None or parameter is None else plan.binding.name_of(parameter)

    def _bind(self, optimizer: torch.optim.Optimizer) -> Plan:
        """Agrees with the other ranks about a plan: at first, and when other ranks or another state may be there."""
        if self._plan is not None and self._loaded is None:
            # A rank may have got another number; what it owes is still its own.
            self._loaded = {**self.state_dict(), "rank": None}
        about = {"bits": self.controller.bits, "steps so far": self._steps, "auto_level": self._auto is not None}
        self._plan = agree(optimizer, self._names, self._settings, self._loaded, about)
        self._loaded, self._unsettled = None, False
        return self._plan

    def _begin_step(self, plan: Plan) -> Step:
        """Fixes the level for all gradients until they have been collected."""
        # A process set of one worker has nobody to send to.
        bits = self.controller.bits if plan.binding.world_size > 1 else UNCOMPRESSED
        if self._auto is not None:
            bits = self._auto.begin_step(bits, self.controller.epoch, time.monotonic())
        step = Step(
            plan.binding,
            plan.buckets,
            bits=bits,
            choice=self._auto.verdict if self._auto is not None else 0,
            number=self._steps,
            seed=self._seed,
            traffic=self.meter.at(self.controller.epoch, bits),
        )
        self._steps += 1
        return step

    def _note_uncompressed(self, tensor: torch.Tensor) -> None:
        world_size = rank_and_size()[1]
        traffic = self.meter.at(self.controller.epoch, UNCOMPRESSED)
        traffic.uncompressed_bytes += allreduce_bytes(tensor.numel() * tensor.element_size(), world_size)
        traffic.float32_bytes += allreduce_bytes(tensor.numel() * 4, world_size)
        if not self._warned:
            self._warned = True
            logger.warning(
                "DynamicQuantizer compresses the gradients of an optimizer only; a tensor of shape %s that "
                "was passed outside one travels uncompressed",
                tuple(tensor.shape),
            )
