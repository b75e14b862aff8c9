"""Wrappers that torch.compile and frameworks put around a model: what is in them is compressed."""

from __future__ import annotations

from typing import Any

REPLICATE = (
    "; it was made by torch's replicate, which hvd_dyncomp.ddp cannot reach: wrap the model in "
    "DistributedDataParallel, or give replicate(module, mesh=) a mesh with the backend of "
    "hvd_dyncomp.fsdp.register_backend()"
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
