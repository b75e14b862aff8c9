"""What Horovod and DistributedDataParallel do differently: how a model's gradients get to be exchanged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from common import device
from hvd_dyncomp.transport import ranks
from train.compression import Baseline, Quantized

# DDP compares the strides of dimensions of size 1, too, which torch's own rule for gradients leaves open: those of a
# convolution of grey images have others than its weight, in the same order in memory.
_STRIDES = "Grad strides do not match bucket view strides"
# forward_sync_buffers, which is to take its place, is not in every torch.
_BUFFERS = "`broadcast_buffers` is deprecated"
_BUCKET_MB = 8  # of the model's, which are handed over when they are full; the quantizer's own are as large


class WithHorovod:
    """`hvd.DistributedOptimizer`, whose compression is Horovod's or the quantizer."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, compression: Baseline | Quantized) -> None:
        import horovod.torch as hvd

        from hvd_dyncomp import DynamicQuantizer

        if isinstance(compression, Quantized):
            compressor: Any = DynamicQuantizer(compression.controller, **compression.arguments)
            compression.quantizer = compressor
        else:
            compressor = {32: hvd.Compression.none, 16: hvd.Compression.fp16}[compression.bits]
        self._model, self._broadcast = model, hvd.broadcast_parameters
        self.forward: Callable[[torch.Tensor], torch.Tensor] = model
        self.optimizer: Any = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), compression=compressor
        )
        if isinstance(compression, Quantized):
            compressor.attach(self.optimizer)  # or a resumed run would not repeat the uninterrupted one

    def broadcast(self) -> None:
        """Gives all ranks rank 0's parameters and buffers. Collective."""
        self._broadcast(self._model.state_dict(), root_rank=0)

    def synchronize(self) -> None:
        """Waits until the gradients are means."""
        self.optimizer.synchronize()

    def synchronized(self) -> AbstractContextManager[Any]:
        """In which the optimizer's step does not wait for them again."""
        return self.optimizer.skip_synchronize()


class WithDdp:
    """`DistributedDataParallel`, with a communication hook of torch's or the quantizer's."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, compression: Baseline | Quantized) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

        from hvd_dyncomp import ddp

        refused = device.nccl_refuses(next(model.parameters()).device)
        self._group = torch.distributed.new_group(backend="gloo") if refused else None
        for noise in (_STRIDES, _BUFFERS):
            warnings.filterwarnings("ignore", noise)
        # Buffers are averaged once an epoch, as with Horovod.
        self.forward = nn.parallel.DistributedDataParallel(
            model, process_group=self._group, bucket_cap_mb=_BUCKET_MB, broadcast_buffers=False
        )
        self.optimizer, self._model = optimizer, model
        if isinstance(compression, Quantized):
            compression.quantizer = ddp.compress(self.forward, compression.controller, **compression.arguments)
        elif compression.bits == 16:
            self.forward.register_comm_hook(self._group, fp16_compress_hook)

    def broadcast(self) -> None:
        """Gives all ranks rank 0's parameters and buffers. Collective."""
        for tensor in self._model.state_dict().values():
            torch.distributed.broadcast(tensor, src=0, group=self._group)

    def synchronize(self) -> None:
        """Backward ends when the gradients are means."""

    def synchronized(self) -> AbstractContextManager[Any]:
        """Nothing waits for them in the optimizer's step."""
        return nullcontext()


def distribute(
    model: nn.Module, optimizer: torch.optim.Optimizer, compression: Baseline | Quantized
) -> WithHorovod | WithDdp:
    """Has the workers' gradients exchanged, by what the launcher is for. Collective."""
    return (WithDdp if ranks.under_torchrun() else WithHorovod)(model, optimizer, compression)
