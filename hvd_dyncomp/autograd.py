"""What front ends ask of torch's autograd engine while a backward pass is under way."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd import Variable


def call_at_end(function: Callable[[], None]) -> bool:
    """Have a function called when backward has ended, after all that was told so before; return whether one runs."""
    try:
        Variable._execution_engine.queue_callback(function)
    except RuntimeError:
        return False
    return True


def computes() -> bool:
    """Whether backward computes: not in the first pass with `static_graph`, in whose end the model calls its hooks."""
    return torch._C._current_autograd_node() is not None
