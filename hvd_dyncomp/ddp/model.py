"""A model as a source of gradients."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from hvd_dyncomp.autograd import check_engine
from hvd_dyncomp.checks import shown
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.torch_names import check_names
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport

logger = logging.getLogger(__name__)

_NAMES = ("_comm_hooks", "_get_ddp_logging_data", "_use_python_reducer", "mixed_precision", "parameters_to_ignore")
_PASSES = 100  # without an exchange, from the first one on, before a warning
NEVER_SYNCED = (
    "the first %d backward passes of a compressed model have exchanged nothing, so compress has no effect: all of them "
    "ran in model.no_sync() or with require_backward_grad_sync=False, as within Accelerate's LocalSGD. Run the last "
    "pass before each optimizer.step() outside of no_sync; for local steps, average the changes of the parameters with "
    "an hvd_dyncomp.Averager (docs/averager.md). Ignore this warning if one step accumulates gradients over more passes"
)
HOOKED = (
    "the model has a communication hook already; compress a model once, and register no hook of another kind "
    "(compress averages gradients by itself)"
)
NOT_WRAPPED = (
    "; pass what the framework has wrapped: accelerator.prepare(model), trainer.model_wrapped of Transformers' Trainer "
    "in on_train_begin, trainer.strategy.model of Lightning's in on_fit_start"
)
REPLICATE = (
    "; it was made by torch's replicate, which hvd_dyncomp.ddp cannot reach: wrap the model in "
    "DistributedDataParallel, or give replicate(module, mesh=) a mesh with the backend of "
    "hvd_dyncomp.fsdp.register_backend()"
)
FSDP1 = "; FSDP1 is not supported: use fully_shard (FSDP2) and hvd_dyncomp.fsdp.register_backend (docs/fsdp.md)"
FSDP2 = "; models of fully_shard (FSDP2) need hvd_dyncomp.fsdp.register_backend (docs/fsdp.md)"


def check_kind(model: Any) -> None:
    """Check that a model has a process group.

    Raises:
        TypeError: it has none. On this rank only: nobody can be told without a group.
    """
    if isinstance(model, DistributedDataParallel):
        return
    classes = {kind for each in getattr(model, "modules", tuple)() for kind in type(each).__mro__}
    kinds = {kind.__name__ for kind in classes}
    if any(kind.__module__.startswith("torch.distributed._composable.replicate") for kind in classes):
        instead = REPLICATE
    elif "FSDPModule" in kinds:
        instead = FSDP2
    elif "FullyShardedDataParallel" in kinds:
        instead = FSDP1
    elif isinstance(model, nn.Module):
        instead = NOT_WRAPPED
    else:
        instead = ""
    raise TypeError(f"model must be a torch.nn.parallel.DistributedDataParallel, got {shown(model)}{instead}")


def check_model(model: DistributedDataParallel) -> None:
    """Check that a model can be compressed.

    Raises:
        ValueError: it cannot.
        RuntimeError: this version of torch is not known.
    """
    check_engine()
    check_names(model, _NAMES)
    if model.mixed_precision is not None:
        raise ValueError(
            "mixed_precision= of DistributedDataParallel has a communication hook of its own; use torch.autocast, or "
            "convert the model's parameters, instead"
        )
    if getattr(model, "_delay_all_reduce_params", None):
        raise ValueError(
            "delay_all_reduce_named_params= of DistributedDataParallel reduces gradients without a hook, and "
            "compressed models would differ between ranks; leave it out"
        )
    if any(hasattr(parameter, "_in_backward_optimizers") for parameter in model.parameters()):
        raise ValueError(
            "the model's optimizer steps within backward (_apply_optimizer_in_backward), before gradients are means; "
            "call optimizer.step() after backward instead"
        )
    if model._comm_hooks or "comm_hook" in model._get_ddp_logging_data():  # torch's built-in ones are there only
        raise ValueError(HOOKED)
    if model._use_python_reducer:
        raise ValueError(
            "torch._dynamo.config.optimize_ddp is 'python_reducer', which hands gradients to no hook in buckets; leave "
            "it at its default"
        )


class Hooks(list):
    """The hooks of a model. A copy of the model has none, as its reducer has none: it is no compressed model."""

    def __reduce__(self) -> tuple:
        return list, ()


def register(model: DistributedDataParallel, state: Any, hook: Callable[..., Any]) -> None:
    """Have a model call a communication hook.

    Raises:
        ValueError: it has one.
    """
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        raise ValueError(HOOKED) from error
    model._comm_hooks = Hooks(model._comm_hooks)


def _warned(speaks: bool) -> Iterator[None]:
    if speaks:
        logger.warning(NEVER_SYNCED, _PASSES)
    yield


class ModelGradients(Source):
    """The gradients of one model.

    Attributes:
        count: how many gradients the model reduces in a backward pass; also of what is frozen by now.
    """

    own_memory = True  # the model's buckets
    as_in_memory = True
    transport: ProcessGroupTransport

    def __init__(self, model: DistributedDataParallel, among: ProcessGroupTransport, label: str) -> None:
        super().__init__(among)
        self._model = weakref.ref(model)  # which has the quantizer, by its hook
        self.label = label
        self._counts: RemovableHandle | None = None
        self.count = int(model._get_ddp_logging_data()["num_parameter_tensors"])
        self.named = [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]

    def watch(self) -> None:
        """Count passes until `synced` is called."""
        # No function of Python's before it warns, either: Ctrl-C may be raised in one while the model reduces.
        calls = itertools.chain(
            itertools.repeat(None, _PASSES - 1), _warned(self.transport.rank == 0), itertools.repeat(None)
        )
        if self.named:
            count = functools.partial(next, calls)
            self._counts = self.named[-1][1].register_post_accumulate_grad_hook(count)

    def synced(self) -> None:
        """Count no more passes: one exchanges gradients."""
        if self._counts is not None:
            self._counts.remove()
            self._counts = None

    def trained(self) -> list[tuple[str, torch.Tensor]]:
        model = self._model()
        if model is None:
            return []
        reduced = {name for name, _ in self.named}
        return [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if (parameter.requires_grad or name in reduced) and name not in model.parameters_to_ignore
        ]
