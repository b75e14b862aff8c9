"""Wrappers that torch.compile and frameworks put around a model: what is in them is compressed."""

from __future__ import annotations

from typing import Any

REPLICATE = (
    "; it was made by torch's replicate, which calls no communication hook: wrap the model in DistributedDataParallel "
    "and pass it to hvd_dyncomp.ddp.compress, or apply fully_shard with the second dimension of a mesh (N, 1) and pass "
    "the model to hvd_dyncomp.fsdp.compress"
)

# By the class's name, so that nothing is imported: the attribute that has the model.
_WRAPPERS = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}


def unwrapped(model: Any) -> Any:
    """What is in all the wrappers around a model."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None and hasattr(model, attribute):
        model = getattr(model, attribute)
    return model


def replicated(model: Any) -> bool:
    """Whether torch's `replicate` was applied to a model or to a part of it: that for DDP or that for FSDP2."""
    kinds = {kind.__module__ for each in getattr(model, "modules", tuple)() for kind in type(each).__mro__}
    return any(kind.startswith("torch.distributed._composable.replicate") for kind in kinds)
