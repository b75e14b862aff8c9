"""The two calls of a program: one before it makes its mesh, one when its model is sharded."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Unpack

import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import nn

from hvd_dyncomp.checks import shown
from hvd_dyncomp.controller import Controller
from hvd_dyncomp.fsdp.backend import NAME, Replicas, latest
from hvd_dyncomp.fsdp.quantizer import Own, Quantizer
from hvd_dyncomp.policies import Policy
from hvd_dyncomp.sessions.agreement import on_all_ranks
from hvd_dyncomp.sessions.options import Options
from hvd_dyncomp.torch_names import check_names
from hvd_dyncomp.transport.torch_distributed import transport
from hvd_dyncomp.wrappers import unwrapped

ROOT = "(the model)"
_registered: dict[str, Any] = {}  # what `register_backend` was called with last
_attached: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Quantizer]] = weakref.WeakKeyDictionary()


def register_backend(controller: Controller | Policy | float | None = None, **options: Unpack[Options]) -> None:
    """Register the backend "hvd_dyncomp", which averages gradients over replicas. Call it before the mesh is made.

        hvd_dyncomp.fsdp.register_backend(4)
        mesh = init_device_mesh(..., backend_override={"replicate": "hvd_dyncomp"})

    Every later mesh with this `backend_override` takes these settings; a second call changes those of the next meshes.
    Sizes, as in `min_numel` and `bucket_bytes`, are those of this rank's shards.

    Args:
        controller: gives the number of bits; default: a constant level of 4 bits. For a policy or a level, a new
            controller is created.
        options: see `hvd_dyncomp.sessions.options.Options`.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value.
        RuntimeError: this version of torch lacks something that hvd_dyncomp needs.
    """
    check_names(torch_fsdp, ("FSDPModule",))
    controller = Quantizer(controller, **options).controller  # which checks them
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _new_group, extended_api=True, devices=["cpu", "cuda"])
    _registered.clear()
    _registered.update(controller=controller, **options)


def _new_group(options: Any, _: Any) -> Replicas:
    ranks = options.global_ranks_in_group or range(options.group_size)
    return Replicas(options.store, options.group_rank, ranks, options.timeout, dict(_registered))


def attach(
    model: nn.Module,
    controller: Controller | Policy | float | None = None,
    *,
    replicas: dist.ProcessGroup | None = None,
    **options: Unpack[Options],
) -> Quantizer:
    """Tell the backend a model's modules and parameters. Call it on every rank of the job, several models in one order.

    The gradients of each parameter then have a place of their own: small ones go at 8 bits, `skip` and `less_momentum`
    work, replicas are compared, states have the parameters' names, and modules may be left out in any step. On CPUs,
    exchanges overlap with backward. A module's first step is uncompressed: it shows where its gradients lie.

    It sets the model's all-reduce hooks (`set_all_reduce_hook`): a program must not set others.

    Args:
        model: torch's `fully_shard` or `replicate` was applied to the model, with a mesh whose axis of replicas has the
            backend "hvd_dyncomp".
        controller: as in `register_backend`. Without it, controller and options are those of that call.
        replicas: the group whose parameters are meant, if the model has several (experts with a mesh of their own):
            call `attach` for each.
        options: see `hvd_dyncomp.sessions.options.Options`.

    Raises:
        TypeError, ValueError: an argument has a wrong type or value, or the model has no such mesh.
        LockstepError: another rank has raised such an error, or replicas differ. On all ranks that have no error of
            their own.
        TimeoutError, ConnectionError: another rank does not call it in time, or has ended.
    """
    everyone = transport()
    label = everyone.new_label("fsdp")  # also of calls that fail: it must be the same on all ranks
    with on_all_ranks(everyone):
        modules = _modules_of(model)
        group, own = _with_group(modules, replicas)
        given: Any = options if controller is None else {"controller": controller, **options}
        quantizer = Quantizer(**{**group.settings, **given})
    quantizer.connect(group, label, everyone, own, _device_of(own))
    for name in own:
        _attached[modules[name]] = weakref.ref(quantizer)
        modules[name].set_all_reduce_hook(functools.partial(_on_unit, quantizer, group, name))
    group.attached.quantizers.add(quantizer)
    return quantizer


def _on_unit(quantizer: Quantizer, group: Replicas, name: str, flat: torch.Tensor) -> None:
    """What FSDP calls when `dist.all_reduce` has returned."""
    sums = group.attached.claim(flat) if group.size() > 1 else None
    if sums is not None:
        quantizer.on_unit(name, flat, sums=sums)


def _modules_of(model: Any) -> dict[str, Any]:
    """By name, the modules to which `fully_shard` or `replicate` was applied.

    Raises:
        TypeError: it is no such model.
        ValueError: a parameter is not sharded.
    """
    model = unwrapped(model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a module that fully_shard was applied to, got {shown(model)}")
    modules = {
        name or ROOT: module for name, module in model.named_modules() if isinstance(module, torch_fsdp.FSDPModule)
    }
    if not modules:
        raise TypeError(
            f"model must be a module that torch's fully_shard was applied to, got {shown(model)}; for "
            "DistributedDataParallel there is hvd_dyncomp.ddp.compress"
        )
    for module in modules.values():
        module.reshard()  # after a forward pass alone, the parameters may be the whole ones
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and not hasattr(parameter, "device_mesh"):
            raise ValueError(
                f"parameter {name} is not sharded, so its gradient would not be averaged: apply fully_shard to the "
                "model itself, too, after its modules, or freeze the parameter"
            )
        if parameter.is_meta:
            raise ValueError(f"parameter {name} is on the meta device; call attach after model.to_empty(...)")
    return modules


def _with_group(modules: dict[str, Any], replicas: Any) -> tuple[Replicas, Own]:
    """The group of replicas, and by module the parameters that it averages.

    Raises:
        ValueError: there is none, or several.
    """
    found: dict[Replicas, dict[str, dict[str, torch.Tensor]]] = {}
    seen: set[int] = set()  # a parameter may have several names
    for name, module in modules.items():
        for key, parameter in _own_parameters(module, "" if name == ROOT else f"{name}."):
            group = None if id(parameter) in seen else _group_of(parameter, replicas)
            if group is not None:
                found.setdefault(group, {}).setdefault(name, {})[key] = parameter
            seen.add(id(parameter))
    if not found:
        raise ValueError(
            f"model has no parameter on a mesh whose axis of replicas has the backend {NAME}: call "
            "hvd_dyncomp.fsdp.register_backend(4) first, then init_device_mesh(..., "
            f'backend_override={{"replicate": "{NAME}"}}), then fully_shard or replicate with that mesh'
        )
    if len(found) > 1:
        names = " and ".join(next(iter(own)) for own in found.values())
        raise ValueError(
            f"{names} have replicas in different groups: call attach for each of them, with "
            'replicas=mesh.get_group("replicate")'
        )
    [(group, own)] = found.items()
    for name in own:
        before = _attached.get(modules[name], lambda: None)()
        if before is not None and not before.failed:
            raise ValueError(f"{name} is attached already; call attach only once for a model")
    return group, own


def _own_parameters(module: Any, prefix: str) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of a module's parameters outside those modules within it that are units of their own."""
    own = [(f"{prefix}{name}", each) for name, each in module.named_parameters(recurse=False)]
    for name, child in module.named_children():
        if not isinstance(child, torch_fsdp.FSDPModule):
            own += _own_parameters(child, f"{prefix}{name}.")
    return own


def _device_of(own: Own) -> torch.device:
    """Where FSDP makes the gradients: with offloading, not where the parameters are."""
    kind = next(iter(next(iter(own.values())).values())).device_mesh.device_type  # type: ignore[attr-defined]
    return torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)


def _group_of(parameter: Any, replicas: Any) -> Replicas | None:
    """The group of the ranks that have the same shard of a parameter: `replicas`, unless that is None."""
    mesh: Any = getattr(parameter, "device_mesh", None)
    for axis in range(mesh.ndim if mesh is not None else 0):
        ranks = tuple(dist.get_process_group_ranks(mesh.get_group(axis)))
        found = replicas or latest.get(ranks)
        same = isinstance(found, Replicas) and tuple(dist.get_process_group_ranks(found)) == ranks
        if same and not parameter.placements[axis].is_shard():
            return found
    return None
