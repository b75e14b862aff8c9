"""Text that is at hand wherever Python is: the docstrings of its standard library."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

CHARACTERS = 96  # ASCII from the blank on, and the end of a line


def docstrings(most: int, folder: Path | None = None) -> Tensor:
    """Characters as numbers below `CHARACTERS`, int64 (at most `most`,): file by file, in the order of their names.

    Args:
        most: characters.
        folder: of Python files; None for the standard library's own, without its packages and tests.
    """
    folder = folder or Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    length = 0
    for path in [*sorted(folder.glob("*.py")), *sorted(folder.glob("[a-z]*/*.py"))]:
        inside = str(path.parent.relative_to(folder))
        if "test" in inside or "packages" in inside or length >= most:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append((ast.get_docstring(node) or "") + "\n")
                length += len(found[-1])
    raw = "".join(found).encode("ascii", errors="ignore")[:most]
    numbers = torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()
    return torch.where(numbers >= 32, numbers - 31, 0).clamp(max=CHARACTERS - 1)
