"""What front ends ask of torch's autograd engine while a backward pass is under way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable

from hvd_dyncomp.torch_names import check_names

NO_PASS = -1


def check_engine() -> None:
    """Raises: RuntimeError: torch lacks something that is asked for here."""
    check_names(torch._C, ("_current_graph_task_id", "_current_autograd_node"))
    check_names(Variable, ("_execution_engine",))
    check_names(Variable._execution_engine, ("queue_callback",))


def call_at_end(function: Callable[[], object]) -> bool:
    """Have a function called when the current pass ends, after all that was told so before; return whether one runs."""
    try:
        Variable._execution_engine.queue_callback(function)  # type: ignore[arg-type]  # what it returns is dropped
    except RuntimeError:
        return False
    return True


def current_pass() -> int:
    """The backward pass that is under way in this thread: the innermost, if one runs within another; or `NO_PASS`."""
    return torch._C._current_graph_task_id()


def computes() -> bool:
    """Whether backward computes: where an inner pass ends, but not where the outermost one does.

    In the first pass with `static_graph` the model calls its hooks there.
    """
    return torch._C._current_autograd_node() is not None
