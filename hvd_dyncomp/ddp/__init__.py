"""The exchange for `torch.nn.parallel.DistributedDataParallel`, without Horovod.

model = DistributedDataParallel(model)
quantizer = hvd_dyncomp.ddp.compress(model, 4)
"""

from __future__ import annotations

import logging
from typing import Unpack, cast

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.averaging import Averager
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.ddp.quantizer import Quantizer
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.transport.alone import Alone
from hvd_dyncomp.transport.launched import processes
from hvd_dyncomp.transport.torch_distributed import transport
from hvd_dyncomp.wrappers import unwrapped

logger = logging.getLogger(__name__)

__all__ = ["Quantizer", "compress", "transport"]


def compress(
    model: nn.Module, controller: Controller | Policy | float | None = None, **options: Unpack[Options]
) -> Quantizer | Averager:
    """Compress the gradients of a model. Collective: call it on every rank, before the first backward pass.

    Compress several models in the same order on every rank. The parameters must have the same values on all ranks, as
    they have after `DistributedDataParallel(...)`. If an error is raised, the model is unchanged.

    Args:
        model: a `DistributedDataParallel`, which torch.compile or Lightning Fabric may have wrapped. It must have no
            communication hook, and must not be compressed already. With a smaller `bucket_cap_mb`, gradients are sent
            earlier; 8 is the size of the quantizer's own buckets. With only one process, any module is accepted.
        controller: gives the number of bits; default: a constant level of 4 bits. For a policy or a level, `compress`
            creates a controller over the model's process group.
        options: see `hvd_dyncomp.sessions.options.Options`.

    Returns:
        A `Quantizer`. Its `controller` has the level, its `meter` counts bytes, and its `state_dict` belongs in
        checkpoints. For a model that one process trains alone without `DistributedDataParallel`: an `Averager` that
        has nothing to do.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the model cannot be compressed.
        LockstepError: another rank has raised such an error, or the ranks compress different models. On all ranks that
            have no error of their own.
        TimeoutError, ConnectionError: another rank does not call it in time, or has ended.

    Examples:
        One rank of one, which sends nothing. With `torchrun`, call `init_process_group("gloo")` or
        `init_process_group("nccl")`; the other lines stay as they are.

        >>> import torch, torch.distributed as dist, hvd_dyncomp
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(torch.nn.Linear(40, 30))
        >>> quantizer = hvd_dyncomp.ddp.compress(model, 4, warmup_steps=100, warmup_bits=8)
        >>> model(torch.ones(3, 40)).sum().backward()  # with several ranks, gradients are means from here on
        >>> quantizer.bits, quantizer.controller.bits, quantizer.meter.total().steps
        (8, 4, 1)
        >>> dist.destroy_process_group()
    """
    model = unwrapped(model)
    if isinstance(model, nn.Module) and not isinstance(model, DistributedDataParallel) and processes() == 1:
        logger.warning("compress: one process trains this model, so there is nothing to compress")
        trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        return Averager(trained, controller, transport=Alone(), **options)
    return Quantizer(cast(DistributedDataParallel, model), controller, **options)
