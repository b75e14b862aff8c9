"""The exchange for `torch.nn.parallel.DistributedDataParallel`, without Horovod.

model = DistributedDataParallel(model)
quantizer = hvd_dyncomp.ddp.compress(model, hvd_dyncomp.StepFunction())
...
quantizer.controller.step({"val_accuracy": accuracy, "train_loss": loss})  # after each epoch
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.controller import Controller
from hvd_dyncomp.ddp.quantizer import Quantizer
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.transport.torch_distributed import transport

__all__ = ["Quantizer", "compress", "transport"]


def compress(
    model: DistributedDataParallel, controller: Controller | Policy | float | None = None, **arguments: Any
) -> Quantizer:
    """Compress the gradients of a model. Collective: call it on every rank, before the first backward pass.

    Several models: in the same order on every rank. Their parameters must have the same values on all ranks, as after
    `DistributedDataParallel(...)`. The model is as before if an error is raised.

    Args:
        model: without a communication hook, and not compressed before. With a smaller `bucket_cap_mb` gradients are
            sent earlier; 8 is the size of the quantizer's own buckets.
        controller: a policy or a level makes a controller over the model's process group. Or pass
            `Controller(policy, transport=hvd_dyncomp.ddp.transport())`.
        arguments: those of `DynamicQuantizer`: error_feedback, rounding, block_size, min_numel, skip,
            fp16_skipped, bucket_bytes, auto_level, hierarchical, discardable, warmup_steps, warmup_bits. Also
            `optimizer`, if `without_momentum` made it.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the model cannot be compressed.
        LockstepError: another rank has raised such an error, or the ranks compress different models. On all ranks that
            have no error of their own.
        TimeoutError, ConnectionError: another rank does not call it in time, or has ended.
    """
    return Quantizer(model, controller, **arguments)
