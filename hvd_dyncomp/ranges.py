"""Ranges with names such as hvd_dyncomp.encode in the traces of torch's profiler.

While no profiler runs, a call costs a fraction of a microsecond more (torch's own `record_function`: several). Use it
for what is called a few times per bucket and step, not per tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from torch.autograd import profiler

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def marked(name: str) -> Callable[[Callable[Arguments, Result]], Callable[Arguments, Result]]:
    """Make every call of a function a range of this name."""

    def decorate(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        @functools.wraps(function)
        def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            # torch has it for such checks, but undocumented; without it, every call is recorded.
            if not getattr(profiler, "_is_profiler_enabled", True):
                return function(*args, **kwargs)
            with profiler.record_function(f"hvd_dyncomp.{name}"):
                return function(*args, **kwargs)

        return call

    return decorate
