"""Wrappers that torch.compile and frameworks put around a model: what is in them is compressed."""

from __future__ import annotations

from typing import Any

# By the class's name, so that nothing is imported: the attribute that has the model.
_WRAPPERS = {"OptimizedModule": "_orig_mod", "_FabricModule": "_forward_module"}


def unwrapped(model: Any) -> Any:
    """What is in all the wrappers around a model."""
    while (attribute := _WRAPPERS.get(type(model).__name__)) is not None and hasattr(model, attribute):
        model = getattr(model, attribute)
    return model
