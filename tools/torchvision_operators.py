"""Makes ``import torchvision`` work beside a CPU build of torch. tools/setup.sh puts it into the virtual environment.

Python's package index has torchvision as a build for CUDA. Beside a CPU build of torch its shared library does not
load, which it allows for; but then it describes two of its operators, and torch refuses descriptions of what nobody has
declared ("operator torchvision::nms does not exist"). Declared without an implementation they satisfy it: data sets,
transforms and models work, and whatever calls an operator is told that there is none.

A line in torchvision_operators.pth calls `install` when Python starts. Nothing is imported then: a loader of our own
waits for torchvision, runs its module ``extension``, and asks that whether the operators are there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
# torch takes declarations back when the library that made them is collected.
_kept: list[object] = []


class _Loader(SourceFileLoader):
    """Loads torchvision.extension, which is where torchvision loads its shared library."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        import torch

        cpu_only = torch.version.cuda is None and torch.version.hip is None
        # With a GPU build of torch, operators that do not load are a mistake, which had better show.
        if cpu_only and not module._has_ops() and not hasattr(torch.ops.torchvision, "nms"):
            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                library.define(schema)
            _kept.append(library)


class _Finder:
    """Finds torchvision.extension where it is, and has it loaded by `_Loader`; knows nothing else."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != "torchvision.extension":
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def install() -> None:
    """Have torchvision's import looked after from now on, in this process."""
    sys.meta_path.insert(0, _Finder)
