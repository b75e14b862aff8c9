"""What a run changes in torch and Horovod: all of it is here, and undone at the end."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.commands.run.models import Models
from hvd_dyncomp.exchange.topology import Topology

FSDP = (
    "a model of fully_shard (FSDP2) is left as it is: only a line in the program can say when the model is complete; "
    "call hvd_dyncomp.fsdp.register_backend() and make its mesh with that backend (docs/fsdp.md)"
)
LEFT = "an hvd.DistributedOptimizer is left as it is: {}"
PASSED = "the program has passed compression="

_models: Models | None = None  # of the run; not in hooks, so that a model can be copied and pickled as without them


@contextlib.contextmanager
def changed(models: Models) -> Iterator[None]:
    """Within it the models that a program makes are compressed. It changes these, and undoes it:

    - `DistributedDataParallel.__init__` gives the model a forward pre-hook. At the first call with gradients, the hook
      gives the parameters hooks, which compress the model where the first backward pass ends that has reduced its
      gradients. All ranks come there, whatever one of them does alone before; and by then the program has registered
      its own communication hook, or none. All these hooks are removed then, or after a comparison.
    - `horovod.torch.DistributedOptimizer`, where `compression` is the default, gets a `DynamicQuantizer`.
    - a subclass of `FSDPModule`, which `fully_shard` makes of a model's class, gives a warning.

    Args:
        models: that compress, and report.
    """
    with contextlib.ExitStack() as changes:
        _set(changes, sys.modules[__name__], "_models", models)
        _set(changes, DistributedDataParallel, "__init__", _initializing(DistributedDataParallel.__init__))
        if hasattr(torch_fsdp, "FSDPModule"):
            _set(changes, torch_fsdp.FSDPModule, "__init_subclass__", classmethod(_sharded))
        for name in ("horovod.torch", "horovod.torch.optimizer"):  # imported by `hvd_dyncomp`, if they are there
            if (module := sys.modules.get(name)) is not None:
                _set(changes, module, "DistributedOptimizer", _optimizing(module.DistributedOptimizer, models))
        yield


def _set(changes: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    if name in vars(owner):
        changes.callback(setattr, owner, name, vars(owner)[name])
    else:
        changes.callback(delattr, owner, name)
    setattr(owner, name, value)


def _initializing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_forward_pre_hook(_before_call)

    return __init__


@torch.compiler.disable
def _before_call(model: DistributedDataParallel, inputs: Any) -> None:
    """Note a call whose gradients may be reduced, until the model has been compressed."""
    if _models is None or not torch.is_grad_enabled() or _models.on_call(model):
        return
    for key in [key for key, hook in model._forward_pre_hooks.items() if hook is _before_call]:
        del model._forward_pre_hooks[key]


def _sharded(kind: Any, **arguments: Any) -> None:
    super(torch_fsdp.FSDPModule, kind).__init_subclass__(**arguments)
    if _models is not None and issubclass(kind, nn.Module):  # torch's own subclasses are not
        _models.tell(FSDP)


def _optimizing(original: Callable[..., Any], models: Models) -> Callable[..., Any]:
    from hvd_dyncomp.on_horovod.quantizer import DynamicQuantizer  # Horovod is there
    from hvd_dyncomp.transport.horovod import averaging_factor

    signature = inspect.signature(original)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["compression"] is not signature.parameters["compression"].default:
            models.tell(LEFT.format(PASSED))
            return original(*args, **kwargs)
        try:
            averaging_factor(given.arguments["op"], 1)
        except ValueError as error:
            models.tell(LEFT.format(error))
            return original(*args, **kwargs)
        comparison = models.comparison() if models.compares else None
        given.arguments["compression"] = quantizer = DynamicQuantizer(comparison or models.level)
        optimizer = original(*given.args, **given.kwargs)
        if comparison is None:
            ranks = quantizer.controller.transport
            models.add(quantizer.meter, Topology.of([rank // ranks.local_size for rank in range(ranks.size)]))
        else:
            models.compare(quantizer.meter, comparison)
            optimizer.register_step_post_hook(lambda *_: models.on_step_end(comparison))
        return optimizer

    return wrapper
