"""The only holder of what is known of FSDP2 beyond its documentation: how replicas are averaged, where gradients lie.

Read from torch 2.8 to 2.13; docs/dev/contributing.md has the versions that were run. `Unit` checks what it can where it
is made, and in every step where the gradients have gone.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from hvd_dyncomp.autograd import check_engine
from hvd_dyncomp.checks import shown
from hvd_dyncomp.fsdp.alone import Alone
from hvd_dyncomp.torch_names import check_names
from hvd_dyncomp.wrappers import REPLICATE, replicated, unwrapped

NOT_ALL = (
    "some parameters of {} have no gradient (FSDP passed {} values instead of {}); call "
    "model.set_reduce_scatter_unused_params(True), which is available from torch 2.12 on"
)
BY_ITSELF = (
    "FSDP itself has averaged the gradients of {} over the replicas, uncompressed: torch {} does not use the process "
    "group that hvd_dyncomp has installed; use a version of torch that README.md names, or a newer hvd_dyncomp"
)
# Of FSDP's parameter group, of its parameters and of its mesh, also where that has shards and where it has replicas.
_OF_GROUP = (
    *("_all_reduce_hook", "_partial_reduce_output", "all_reduce_grads", "device", "force_sum_reduction_for_comms"),
    *("fsdp_params", "gradient_divide_factor", "mesh_info"),
)
_OF_PARAMETER = (
    *("_module_info", "offload_to_cpu", "padded_sharded_param_size", "sharded_param", "sharded_size", "sharded_state"),
    "unsharded_accumulated_grad",
)
_OF_MESH = ("replicate_mesh_dim", "shard_mesh_dim")
_OF_SHARDS, _OF_REPLICAS = ("shard_process_group",), ("replicate_process_group",)
# What FSDP2 does not change any more once a hook has returned: no division, no cast.
_UNDIVIDED = (torch.float32, torch.bfloat16)


class Unit:
    """What one call of `fully_shard` has put together: its gradients come together.

    Args:
        name: of the module; "" for the model itself.
        module: that `fully_shard` was applied to.
        group: FSDP's parameter group.
        prefixes: the names of all modules of the model, with a dot.

    Attributes:
        name: as in messages.
        names: of its parameters, in the order in which their gradients lie.
        replica_group: the ranks over which FSDP would average by itself; None if its mesh has shards only.
    """

    def __init__(self, name: str, module: Any, group: Any, prefixes: dict[nn.Module, str]) -> None:
        self.name, self._module, self._group = name or "(the model)", module, group
        info = group.mesh_info
        has_replicas = info.replicate_mesh_dim is not None
        self.replica_group: dist.ProcessGroup | None = info.replicate_process_group if has_replicas else None
        self._alone = Alone()
        self._places = [(each._module_info.module, each._module_info.param_name) for each in group.fsdp_params]
        self.names = [prefixes[owner] + key for owner, key in self._places]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """This rank's shards, as the optimizer has them: DTensors."""
        return [
            getattr(owner, key) if each.sharded_state.name == "SHARDED" else each.sharded_param
            for (owner, key), each in zip(self._places, self._group.fsdp_params, strict=True)
        ]

    def shards(self) -> list[tuple[str, torch.Tensor]]:
        """(name, tensor without memory of its own) of the shape, dtype and device of each of its gradients' shards."""
        device = self._group.device  # with offloading, not the parameter's
        return [
            (name, torch.empty((), dtype=each.sharded_param.dtype, device=device).expand(each.sharded_size))
            for name, each in zip(self.names, self._group.fsdp_params, strict=True)
        ]

    @property
    def shard_group(self) -> dist.ProcessGroup:
        """The ranks among which it is sharded."""
        return self._group.mesh_info.shard_process_group

    @property
    def waits(self) -> bool:
        """Whether it has gradients of earlier backward passes, which a later one is to average with its own."""
        return self._group._partial_reduce_output is not None or any(
            each.unsharded_accumulated_grad is not None
            or getattr(getattr(each, "_unsharded_param", None), "grad", None) is not None  # none before a forward
            for each in self._group.fsdp_params
        )

    def check(self) -> None:
        """Check that its gradients can be averaged over replicas by a hook.

        Raises:
            ValueError: they cannot.
        """
        if self._group.mesh_info.shard_mesh_dim is None:
            raise ValueError(
                f"{self.name} was given a mesh of replicas only; give fully_shard one of two dimensions, with the "
                "shards in the second one, which may have size 1"
            )
        if self.waits:
            raise ValueError(
                f"{self.name} has gradients of a backward pass that have not been averaged; call compress before the "
                "first backward pass"
            )
        if self._group._all_reduce_hook is not None:
            raise ValueError(
                f"{self.name} already has an all-reduce hook; compress a model only once, and set no other such hook"
            )
        if any(parameter.is_meta for parameter in self.parameters):
            raise ValueError(f"{self.name} has parameters on the meta device; call compress after model.to_empty(...)")

    def average_by(self, hook: Callable[[torch.Tensor], None]) -> None:
        """Have a hook average over replicas what FSDP has averaged over shards. FSDP's own all-reduce is over.

        With a mesh of replicas and shards FSDP goes on to do all else for these: it adds up in the shards while
        `set_requires_all_reduce(False)` holds.
        """
        if self.replica_group is not None:
            info = copy.copy(self._group.mesh_info)  # equal to it, which FSDP looks at; another model may have it, too
            info.replicate_process_group = self._alone
            self._group.mesh_info = info
        self._module.set_all_reduce_hook(hook)

    @property
    def divide_factor(self) -> float | None:
        """What FSDP divides sums by. By default, None, these are the ranks; otherwise it would sum over replicas."""
        return self._group.gradient_divide_factor

    def check_settings(self) -> None:
        """Check, in a hook, what a program may set at any time.

        Raises:
            ValueError: means would be wrong.
            RuntimeError: FSDP has averaged over replicas.
        """
        if self.replica_group is not None and not self._alone.asked():
            raise RuntimeError(BY_ITSELF.format(self.name, torch.__version__))
        if not self._group.all_reduce_grads:  # FSDP looks at it only where its mesh has replicas
            raise ValueError(
                f"set_requires_all_reduce(False) of {self.name} needs a mesh of two dimensions in fully_shard, "
                "replicas and shards; with a mesh of shards only, use set_requires_gradient_sync(False) to accumulate"
            )
        if self.divide_factor is not None and self.replica_group is None:
            raise ValueError(
                f"set_gradient_divide_factor of {self.name} needs a mesh of two dimensions in fully_shard, replicas "
                "and shards; with a mesh of shards only, gradients are averaged over all ranks: scale the loss instead"
            )

    def frozen(self) -> list[str]:
        """Names of the parameters that do not require a gradient."""
        return [
            name
            for name, each in zip(self.names, self._group.fsdp_params, strict=True)
            if not each.sharded_param.requires_grad
        ]

    def gradients(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """What a hook gets, by parameter's name: views of `flat`, of the shapes of this rank's shards.

        Raises:
            RuntimeError: some parameters have no gradient, so nobody knows which values are whose.
        """
        trained = [
            (name, each)
            for name, each in zip(self.names, self._group.fsdp_params, strict=True)
            if each.sharded_param.requires_grad
        ]
        lengths = [math.prod(each.padded_sharded_param_size) for _, each in trained]
        if sum(lengths) != flat.numel():
            raise RuntimeError(NOT_ALL.format(self.name, flat.numel(), sum(lengths)))
        return {
            name: part[: math.prod(each.sharded_size)].view(each.sharded_size)
            for (name, each), part in zip(trained, flat.split(lengths), strict=True)
        }

    @property
    def hooked(self) -> bool:
        """Whether hooks will be called with its gradients before backward ends."""
        trained = [each.sharded_param for each in self._group.fsdp_params if each.sharded_param.requires_grad]
        return any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in trained)

    def stays(self, flat: torch.Tensor) -> bool:
        """Whether the parameters' gradients will be views of what a hook gets, and nobody reads them before the end.

        Otherwise FSDP divides, casts, adds or moves the values as soon as the hook has returned.
        """
        return (
            flat.dtype in _UNDIVIDED
            and not self._group.force_sum_reduction_for_comms
            and not self.hooked
            and not any(
                each.sharded_param.grad is not None or each.sharded_param.dtype != flat.dtype or each.offload_to_cpu
                for each in self._group.fsdp_params
                if each.sharded_param.requires_grad
            )
        )

    def check_place(self, gradients: dict[str, torch.Tensor]) -> None:
        """Check, when backward is over, that the parameters' gradients are what a hook got.

        Raises:
            RuntimeError: they are not.
        """
        for name, each in zip(self.names, self._group.fsdp_params, strict=True):
            if name in gradients and gradients[name].numel():
                now = each.sharded_param.grad
                if now is None or now.to_local().data_ptr() != gradients[name].data_ptr():
                    raise RuntimeError(
                        f"the gradient of {name} is not in the memory that FSDP passed to its hook, so it is not the "
                        "mean over the replicas. Did a hook change it in backward? Change gradients after "
                        "loss.backward() instead"
                    )


def units_of(model: Any) -> list[Unit]:
    """The units of a model to whose modules `fully_shard` was applied.

    Raises:
        TypeError: it was not.
        ValueError: some parameters belong to no unit; or to one that cannot be compressed.
        RuntimeError: this version of torch has another FSDP2.
    """
    check_names(torch_fsdp, ("FSDPModule",))
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module that fully_shard was applied to, got {shown(model)}")
    if replicated(model):
        raise TypeError(
            f"model must be a module that torch's fully_shard was applied to, got {shown(model)}{REPLICATE}"
        )
    if not any(isinstance(module, torch_fsdp.FSDPModule) for module in model.modules()):
        raise TypeError(
            f"model must be a module that torch's fully_shard was applied to, got {shown(model)}; for "
            "DistributedDataParallel there is hvd_dyncomp.ddp.compress"
        )
    check_engine()
    units = list(_units(model))
    for unit in units:
        unit.check()
    _check_all_in(model, units)
    return units


def _units(model: nn.Module) -> Iterator[Unit]:
    prefixes = {module: f"{name}." if name else "" for name, module in model.named_modules()}
    seen: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, torch_fsdp.FSDPModule):
            module.reshard()  # after a forward pass alone, the parameters may be the whole ones
            groups = _groups(module)
            if len(groups) > 1:
                raise ValueError(
                    f"the parameters of {name or '(the model)'} are sharded over several meshes; give all calls of "
                    "fully_shard the same one"
                )
            for group in groups:
                if id(group) not in seen:  # fully_shard([one, another])
                    seen.add(id(group))
                    _look_up(group)
                    yield Unit(name, module, group, prefixes)


def _groups(module: Any) -> list[Any]:
    """FSDP's parameter groups of one module."""
    check_names(module, ("_get_fsdp_state",))
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    check_names(state, ("_fsdp_param_group",))  # up to torch 2.11 one, or None
    return [group for group in (state._fsdp_param_group,) if group is not None]


def _look_up(group: Any) -> None:
    """Raises: RuntimeError: a name that is read later is gone."""
    check_names(group, _OF_GROUP)
    info = group.mesh_info
    check_names(info, _OF_MESH)
    check_names(info, _OF_SHARDS if info.shard_mesh_dim is not None else ())
    check_names(info, _OF_REPLICAS if info.replicate_mesh_dim is not None else ())
    for each in group.fsdp_params:
        check_names(each, _OF_PARAMETER)


def _check_all_in(model: nn.Module, units: list[Unit]) -> None:
    """Raises: ValueError: a parameter that is trained belongs to no unit, or two units have different meshes."""
    sharded = {id(parameter) for unit in units for parameter in unit.parameters}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in sharded:
            raise ValueError(
                f"parameter {name} is not sharded, so its gradient would not be averaged: apply fully_shard to the "
                "model itself, too, after its modules, or freeze the parameter"
            )
    places = {tuple(map(_ranks, (unit.shard_group, unit.replica_group))): unit.name for unit in units}
    if len(places) > 1:
        one, other = list(places.values())[:2]
        raise ValueError(
            f"{one} and {other} have meshes of other ranks or dimensions; give all calls of fully_shard the same mesh"
        )


def _ranks(group: dist.ProcessGroup | None) -> tuple[int, ...]:
    return () if group is None else tuple(dist.get_process_group_ranks(group))
