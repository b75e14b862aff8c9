"""A model as a source of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hvd_dyncomp.checks import shown
from hvd_dyncomp.exchange.source import Source
from hvd_dyncomp.momentum import WithoutMomentum
from hvd_dyncomp.transport.torch_distributed import ProcessGroupTransport

HOOKED = (
    "the model has a communication hook already; compress a model once, and register no hook of another kind "
    "(compress averages gradients by itself)"
)


def check_model(model: Any) -> None:
    """Check that a model can be compressed.

    Raises:
        TypeError, ValueError: it cannot.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model must be a torch.nn.parallel.DistributedDataParallel, got {shown(model)}")
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
    if model._comm_hooks:
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


class ModelGradients(Source):
    """The gradients of one model.

    Attributes:
        count: how many gradients the model reduces in a backward pass; also of what is frozen by now.
    """

    kind = "DistributedDataParallel"
    as_in_memory = True
    leaves_tickets = tickets_on_device = False

    def __init__(
        self,
        model: DistributedDataParallel,
        among: ProcessGroupTransport,
        optimizer: torch.optim.Optimizer | None,
    ) -> None:
        self.without_momentum = isinstance(optimizer, WithoutMomentum)
        self.transport = among
        self.rank, self.world_size, self.factor = among.rank, among.size, 1 / among.size
        # Otherwise the same ones are used in every step, and the others have no residual.
        self.sums_tickets = bool(model.find_unused_parameters)
        self.label = f"model{among.models}"
        self.count = int(model._get_ddp_logging_data()["num_parameter_tensors"])
        self.named = [
            (name, parameter)
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]
        for device in {parameter.device for _, parameter in self.named}:
            if obstacle := among.obstacle(device):
                raise ValueError(f"parameters on {device} cannot be sent: {obstacle}")

    def fresh(self, parameter: torch.Tensor) -> bool:
        return not self.sums_tickets  # only backward calls the hook, but a gradient may be missing
