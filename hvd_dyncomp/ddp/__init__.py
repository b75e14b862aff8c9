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
    """Has a model's gradients exchanged compressed. To be called on all ranks alike, before the first backward.

    Args:
        model: not compressed before, and without a communication hook. The smaller its `bucket_cap_mb`, the earlier
            gradients come; 8 is what leaves here at once.
        controller: as `DynamicQuantizer` takes it. A policy or a level makes one over the model's process group. One of
            the user's is `Controller(policy, transport=hvd_dyncomp.ddp.transport())`.
        arguments: as `DynamicQuantizer` has them: error_feedback, rounding, block_size, min_numel, skip,
            fp16_skipped, bucket_bytes, auto_level, hierarchical, warmup_steps, warmup_bits. Besides, `optimizer`,
            if it is one of `without_momentum`; and `timeout`, a timedelta, for whatever is waited for (30 minutes).

    Raises:
        TypeError, ValueError: an argument is out of range or of another type, or the model cannot be used.
    """
    return Quantizer(model, controller, **arguments)
