"""Where the gradients of a unit's parameters lie, as is seen after a backward pass: they are views of one tensor."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from hvd_dyncomp.checks import integer

# What FSDP2 does not change any more once it is averaged: no division, no cast.
_UNDIVIDED = (torch.float32, torch.bfloat16)
MOVED = (
    "the gradient of {} is not in the memory that FSDP gave to all_reduce, so it is not the mean over the replicas. "
    "Did a hook change it in backward? Change gradients after loss.backward() instead. Or was the parameter replaced "
    "(to_empty, load_state_dict(assign=True))? Call attach after that"
)


class Place(NamedTuple):
    """Of a parameter's gradient: where it begins, in values, and its shape on this rank."""

    start: int
    shape: tuple[int, ...]


class Unit:
    """What one call of `fully_shard` has put together: its gradients come in one tensor.

    Args:
        name: of the module; or what else tells it from others.
        own: this rank's shards of its module's parameters, by name; with `fully_shard([a, b])` those of one of them.

    Attributes:
        name, own: see above.
        numel, dtype: of its tensor in the latest pass that was looked at; 0 before that.
        places: by name, what lies where in that; in place of parameters the whole tensor, if nobody knows them.
        shapes: by name, of all that it has ever had: what has no place now is frozen.
    """

    def __init__(self, name: str, own: Mapping[str, torch.Tensor]) -> None:
        self.name, self.own = name, own
        self.numel, self.dtype = 0, torch.float32
        self.places: dict[str, Place] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def whole(self, numel: int) -> str:
        """A name for a tensor of so many values whose parameters are not known."""
        return f"{self.name} ({numel} values)" if self.own else self.name

    def fits(self, flat: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether a tensor has what lies in `places`. `parameters`: the model's, by name."""
        return (self.numel, self.dtype) == (flat.numel(), flat.dtype) and all(
            parameters[name].requires_grad for name in self.places if name in parameters
        )

    def frozen(self, parameters: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of its parameters that do not require a gradient."""
        return sorted(name for name in self.shapes if name in parameters and not parameters[name].requires_grad)

    def gradients(self, flat: torch.Tensor, *, fits: bool) -> dict[str, torch.Tensor]:
        """By name, views of a tensor; if it does not fit, of the whole one."""
        if not fits:
            return {self.whole(flat.numel()): flat.view(-1)}
        return {
            name: flat.view(-1)[start : start + math.prod(shape)].view(shape)
            for name, (start, shape) in self.places.items()
        }

    def stays(self, flat: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether the parameters' gradients will be views of the tensor, and nobody reads them before the end.

        Otherwise FSDP divides, casts, adds or moves the values as soon as all_reduce has returned.
        """
        return flat.dtype in _UNDIVIDED and all(
            name in parameters
            and (p := parameters[name]).grad is None
            and p.dtype == flat.dtype
            and p.device.type == flat.device.type
            and not p._post_accumulate_grad_hooks  # type: ignore[attr-defined]  # torch's stub lacks it
            for name in self.places
        )

    def check_place(self, gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> None:
        """Check, when backward is over, that the parameters' gradients are what was averaged.

        Raises:
            RuntimeError: they are not.
        """
        for name, gradient in gradients.items():
            now = parameters[name].grad
            if now is None or local(now).data_ptr() != gradient.data_ptr():
                raise RuntimeError(MOVED.format(name))

    def learn(self, flat: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> None:
        """Look where the gradients lie, after a pass that has brought a tensor of `flat`'s size and dtype."""
        self.numel, self.dtype = flat.numel(), flat.dtype
        self.places = _places(flat.numel(), self.own, parameters) or {
            self.whole(flat.numel()): Place(0, (flat.numel(),))
        }
        self.shapes |= {name: place.shape for name, place in self.places.items()}

    def state_dict(self) -> dict[str, Any]:
        """Plain data."""
        places = {name: [start, list(shape)] for name, (start, shape) in self.places.items()}
        shapes = {name: list(shape) for name, shape in self.shapes.items()}
        return {"numel": self.numel, "dtype": str(self.dtype), "places": places, "shapes": shapes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned.

        Raises:
            KeyError, TypeError, ValueError, AttributeError: the state is different.
        """
        self.numel = integer("numel", state["numel"], 0)
        self.dtype = getattr(torch, state["dtype"].removeprefix("torch."))
        self.shapes = {name: _shape(shape) for name, shape in state["shapes"].items()}
        self.places = {
            name: Place(integer("start", start, 0, self.numel), _shape(shape))
            for name, (start, shape) in state["places"].items()
        }


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(integer("shape", size, 0) for size in shape)


def local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _places(numel: int, own: Collection[str], parameters: Mapping[str, torch.Tensor]) -> dict[str, Place]:
    """Which gradients share the memory of those of `own`, in order; none if these are no parts of one tensor."""
    gradients = {name: local(p.grad) for name, p in parameters.items() if p.grad is not None}
    gradients = {name: each for name, each in gradients.items() if each.numel()}
    memories = {gradients[name].untyped_storage().data_ptr() for name in own if name in gradients}
    if len(memories) != 1:
        return {}
    [memory] = memories
    inside = {name: each for name, each in gradients.items() if each.untyped_storage().data_ptr() == memory}
    first = next(iter(inside.values()))
    if first.untyped_storage().nbytes() != numel * first.element_size() or not all(
        each.is_contiguous() for each in inside.values()
    ):
        return {}
    places = {name: Place(int(each.storage_offset()), tuple(each.shape)) for name, each in inside.items()}
    return dict(sorted(places.items(), key=lambda item: item[1].start))
