"""Import of torchvision where its compiled operators cannot be loaded.

The package registry's torchvision is built for CUDA. Beside a CPU-only torch its shared library does not load, and
then ``import torchvision`` stops at the first line that registers a fake kernel for an operator which nobody has
declared ("operator torchvision::nms does not exist"). Models, data sets and transforms need none of those
operators; declaring their schemas, without any implementation, is enough to make the import work.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

import torch

# The operators that torchvision/_meta_registrations.py names through torch.library.register_fake at import time.
_SCHEMAS = {
    "nms": "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}

# A torch.library.Library takes its definitions back when it is collected, so one reference has to live for ever.
_kept_alive: list[torch.library.Library] = []


def _operators_load() -> bool:
    """Whether torchvision's shared library can be loaded into this process; True also where it has none."""
    if hasattr(torch.ops.torchvision, "nms"):
        return True
    spec = PathFinder.find_spec("torchvision")
    if spec is None or not spec.submodule_search_locations:
        return True
    for folder in spec.submodule_search_locations:
        for library in sorted(Path(folder).glob("_C.*")):
            try:
                torch.ops.load_library(str(library))
            except (OSError, RuntimeError):
                return False
    return hasattr(torch.ops.torchvision, "nms")


def import_torchvision() -> ModuleType:
    """Return the module ``torchvision``, with the missing operators' schemas declared first if need be.

    Raises:
        ImportError: torchvision is not installed, or its import fails for another reason.
    """
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    if importlib.util.find_spec("torchvision") is None:
        raise ImportError("torchvision is not installed: python -m pip install torchvision")
    if not _kept_alive and not _operators_load():
        library = torch.library.Library("torchvision", "DEF")  # noqa: TOR901 - kept alive on the next line
        _kept_alive.append(library)
        for schema in _SCHEMAS.values():
            library.define(schema)
    try:
        import torchvision
        import torchvision.datasets
        import torchvision.models
    except RuntimeError as error:
        raise ImportError(f"torchvision cannot be imported: {error}") from error
    return torchvision
