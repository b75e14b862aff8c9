"""Run a program as Python itself does."""

from __future__ import annotations

import builtins
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader


def run(program: str, arguments: Sequence[str], *, module: bool) -> None:
    """Run a program as the main one: as `python PROGRAM ARGUMENTS` does, or `python -m PROGRAM ARGUMENTS`.

    `sys.argv`, the first entry of `sys.path` and `sys.modules["__main__"]` are the program's from then on. They stay so
    when it returns, as its threads may go on, and pickle its classes or start processes.

    Args:
        program: a file; also a folder or a zip file with a `__main__.py`.
        arguments: of the program.
        module: whether `program` is a module. It is found by Python's own `-m`, which has put this process's folder
            first on the path.

    Raises:
        BaseException: whatever the program raises.
    """
    sys.argv = [program, *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    if module:
        runpy._run_module_as_main(program)  # type: ignore[attr-defined]  # what `python -m` calls
        return
    holds_main = pkgutil.get_importer(program) is not None
    if not sys.flags.safe_path:  # otherwise nothing was put first
        sys.path[0] = os.path.abspath(program) if holds_main else os.path.dirname(os.path.realpath(program))
    if holds_main:
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # as for `python FOLDER`
        return
    path = os.path.abspath(program)
    loader = SourceFileLoader("__main__", path)
    vars(main).update(__file__=path, __loader__=loader, __cached__=None)
    exec(loader.source_to_code(loader.get_data(path), path), vars(main))  # noqa: S102  # the user's own
