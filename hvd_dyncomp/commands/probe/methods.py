"""Ways to exchange gradients, Horovod's, torch's and this package's, as training steps that take turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hvd_dyncomp.levels import LEVELS

ALONE = "alone"
HOROVOD = ("none", "fp16")
OURS = tuple(f"{bits}bit" for bits in LEVELS)
ONE_LEVEL = {name: f"{name}-flat" for name in OURS}
OURS_IN_DDP = {name: f"{name}-ddp" for name in OURS}
TORCHS = ("ddp", "ddp-fp16", "powersgd1", "powersgd4")
# DistributedDataParallel(model), without an argument.
DDP_DEFAULTS = ("ddp-defaults", "4bit-ddp-defaults")
DDP = (*TORCHS, "ddp-bf16", *OURS_IN_DDP.values(), *DDP_DEFAULTS)
# PowerSGD begins after some plain steps; two is the least with which its hook works.
POWERSGD_START = 2
# One bucket for everything: over Gloo the PowerSGD hook fails with several.
_ONE_BUCKET_MB = 1 << 20
_VIEWS: dict[str, Any] = {"gradient_as_bucket_view": True}  # saves all hooks a copy of the gradients, there and back
_BUCKET_MB = 8  # as docs/training.md advises
# Too small to change weights within a benchmark, and the arithmetic is the same.
_LEARNING_RATE = 1e-6

Loss = Callable[[nn.Module], Tensor]


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=_LEARNING_RATE)


class Stepper:
    """A model, its optimizer and what exchanges gradients between them.

    Args:
        name: `ALONE`, or one of `HOROVOD`, `OURS`, `ONE_LEVEL` and `DDP`.
        model: its own, on one device; parameters may share memory with other steppers' as long as gradients do not.
        loss: runs the forward pass of the model it is given.
        make_optimizer: of the model's parameters; by default SGD whose steps are too small to change weights.
        norm: to which gradients are clipped when they are means; not with Horovod.

    Attributes:
        quantizer: that of `hvd_dyncomp.ddp`, if the method is one of its.
    """

    def __init__(
        self,
        name: str,
        model: nn.Module,
        loss: Loss,
        *,
        make_optimizer: Callable[..., torch.optim.Optimizer] = _sgd,
        norm: float | None = None,
    ) -> None:
        self._model, self._loss, self._norm = model, loss, norm
        self.quantizer: Any = None
        self._optimizer: Any = make_optimizer(model.parameters())
        if name in DDP:
            self._model, self.quantizer = _distributed(name, model)
        elif name != ALONE:
            self._optimizer = _with_horovod(name, model, self._optimizer)

    def step(self) -> Tensor:
        """One training step. Returns the loss."""
        loss = self._loss(self._model)
        loss.backward()
        if self._norm is not None:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._norm)
        self._optimizer.step()
        # At its end: eight workers' gradients of all the steppers that wait for their turns do not fit into memory.
        self._optimizer.zero_grad()
        return loss.detach()

    def finish(self) -> None:
        """Blocks until all is done of what a step has queued: on a GPU, a step returns before that."""
        device = next(self._model.parameters()).device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


def _with_horovod(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import horovod.torch as hvd

    from hvd_dyncomp.on_horovod.quantizer import DynamicQuantizer

    if name in HOROVOD:
        compression = getattr(hvd.Compression, name)
    else:
        bits = float(name.partition("bit")[0])
        hierarchical: Literal[False] | None = False if name in ONE_LEVEL.values() else None
        compression = DynamicQuantizer(bits, hierarchical=hierarchical)
    # Names of one's own: Horovod's cache of what was negotiated would be emptied at each change otherwise.
    named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
    distributed = hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)
    if isinstance(compression, DynamicQuantizer):
        compression.attach(distributed)
    return distributed


def _distributed(name: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model in DistributedDataParallel, and the quantizer, if it is one of ours."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from hvd_dyncomp import ddp

    settings = {} if name in DDP_DEFAULTS else _VIEWS
    bits, ours, _ = name.partition("bit")
    if ours:
        if settings:
            settings = {**settings, "bucket_cap_mb": _BUCKET_MB}
        wrapped = nn.parallel.DistributedDataParallel(model, **settings)
        return wrapped, ddp.compress(wrapped, float(bits))
    if not name.startswith("powersgd"):
        wrapped = nn.parallel.DistributedDataParallel(model, **settings)
        if name == "ddp-fp16":
            wrapped.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif name == "ddp-bf16":
            # Not itself: torch built without CUDA refuses it by its name, though its Gloo adds bfloat16.
            wrapped.register_comm_hook(None, lambda group, bucket: default_hooks.bf16_compress_hook(group, bucket))
        return wrapped, None
    wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=_ONE_BUCKET_MB, **_VIEWS)
    rank = int(name.removeprefix("powersgd"))
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_START)
    wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return wrapped, None
