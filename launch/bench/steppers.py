"""Who takes part in a benchmark: Horovod's and torch's ways to exchange gradients, and ours, behind one face.

none, fp16             Horovod without compression, and with hvd.Compression.fp16
0.125bit ... 32bit     hvd_dyncomp at a constant level; on hosts of several workers, hierarchical
1bit-flat ...          the same, flat: whatever the hosts
4bit-auto              hvd_dyncomp with auto_level, from 4 bits on
1bit-ddp ...           the same as 1bit, for torch's DistributedDataParallel: without Horovod
ddp, ddp-fp16,         torch's DistributedDataParallel over Gloo, without and with its hooks of these names; over NCCL
ddp-bf16               where every worker has a GPU of its own, or NCCL takes several workers a GPU (NCCL 2.30 with
                       NCCL_MULTI_RANK_GPU_ENABLE=1)
powersgd1, powersgd4   the same with its PowerSGD hook, of rank 1 and 4
hsdp, hsdp-bf16        torch's FSDP2, parameters sharded within each host: its own all-reduce between hosts, of float32
                       and with reduce_dtype=bfloat16
1bit-fsdp ...          the same with hvd_dyncomp.fsdp between hosts
shards-alone           the same without any exchange between hosts
alone                  no exchange at all: what forward, backward and update take by themselves

--launcher torchrun does without Horovod: it has alone, and all methods of DDP and FSDP2. There the default of --methods
has DDP's in place of Horovod's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from bench.sharded import SHARDED, shard
from common.device import finish
from common.ranks import transport, under_torchrun
from hvd_dyncomp import LEVELS

ALONE = "alone"
HOROVOD = ("none", "fp16")
OURS = tuple(f"{bits}bit" for bits in LEVELS)
ONE_LEVEL = {name: f"{name}-flat" for name in OURS}
OURS_IN_DDP = {name: f"{name}-ddp" for name in OURS}
AUTO = "4bit-auto"
_TORCHS = ("ddp", "ddp-fp16", "powersgd1", "powersgd4")
DDP = (*_TORCHS, "ddp-bf16", *OURS_IN_DDP.values())
WITHOUT_HOROVOD = (ALONE, *DDP, *SHARDED)
# What stands in for those that need it.
_IN_PLACE_OF = {"none": "ddp", "fp16": "ddp-fp16", **OURS_IN_DDP}
NAMES = (ALONE, *HOROVOD, *OURS, *ONE_LEVEL.values(), AUTO, *DDP, *SHARDED)
_MAIN = ("0.25bit", "1bit", "4bit", "8bit")
_IN_DDP = (*_TORCHS, *(OURS_IN_DDP[name] for name in _MAIN))
DEFAULT = (ALONE, *HOROVOD, "0.25bit", "1bit", "2bit", "4bit", "8bit", "16bit", "32bit", *_IN_DDP)


def without_horovod(names: Iterable[str]) -> tuple[str, ...]:
    """What is measured without Horovod in place of these: DDP's of Horovod's, and those that need no Horovod."""
    found = dict.fromkeys(_IN_PLACE_OF.get(name, name) for name in names)
    return tuple(name for name in found if name in WITHOUT_HOROVOD)


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
        name: one of `NAMES`.
        model: its own, on one device; parameters may share memory with other steppers' as long as gradients do not.
        loss: runs the forward pass of the model it is given.
        mesh: for those of FSDP2, that of `sharded.mesh`.
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
        mesh: DeviceMesh | None = None,
        *,
        make_optimizer: Callable[..., torch.optim.Optimizer] = _sgd,
        norm: float | None = None,
    ) -> None:
        self._model, self._loss, self._norm = model, loss, norm
        self.quantizer: Any = None
        if name in SHARDED:
            if mesh is None:
                raise ValueError(f"{name} needs a mesh")
            shard(name, model, mesh)
        self._optimizer: Any = make_optimizer(model.parameters())
        if name in DDP:
            self._model, self.quantizer = _distributed(name, model)
        elif name not in (ALONE, *SHARDED):
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
        finish(next(self._model.parameters()).device)


def _with_horovod(name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    import horovod.torch as hvd

    from hvd_dyncomp import Controller, DynamicQuantizer, Static

    if name in HOROVOD:
        compression = getattr(hvd.Compression, name)
    else:
        bits = float(name.partition("bit")[0])
        hierarchical: Literal[False] | None = False if name in ONE_LEVEL.values() else None
        compression = DynamicQuantizer(Controller(Static(bits)), hierarchical=hierarchical, auto_level=name == AUTO)
    # Names of one's own: Horovod's cache of what was negotiated would be emptied at each change otherwise.
    named = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
    return hvd.DistributedOptimizer(optimizer, named_parameters=named, compression=compression)


def _distributed(name: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model in DistributedDataParallel, and the quantizer, if it is one of ours."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    from hvd_dyncomp import ddp

    if name in OURS_IN_DDP.values():
        wrapped = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=_BUCKET_MB, **_VIEWS)
        return wrapped, ddp.compress(wrapped, float(name.partition("bit")[0]))
    if not name.startswith("powersgd"):
        wrapped = nn.parallel.DistributedDataParallel(model, **_VIEWS)
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


def start_torch(backend: str, methods: Iterable[str]) -> None:
    """Bring up torch's process group beside Horovod's, if methods need it. Collective. Reads MASTER_ADDR, MASTER_PORT.

    Args:
        backend: "gloo", or "nccl" where every rank has chosen a GPU, and NCCL takes those.
        methods: of `NAMES`.
    """
    if not under_torchrun() and any(name in (*DDP, *SHARDED) for name in methods):
        everybody = transport()
        torch.distributed.init_process_group(backend, rank=everybody.rank, world_size=everybody.size)
