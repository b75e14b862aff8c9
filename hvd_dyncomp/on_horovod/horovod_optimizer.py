"""All that this package knows about Horovod's optimizer beyond its documentation.

Horovod calls `compress(tensor)` without a name. But it does so from a method of its optimizer, and the tensor is the
`.grad` of one of the optimizer's parameters. So the first gradient tells us the optimizer. From then on this one object
has two methods of its own. Horovod does not promise that all this stays so; if it changes,
tests/on_horovod/test_horovod_optimizer.py says what.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from hvd_dyncomp.transport.horovod import averaging_factor

# Returns not None while torch.compile traces this thread. To be opaque to it costs a microsecond and more for every
# gradient. (Not documented by torch; with a torch that lacks it, `bool` makes us opaque always.)
looked_into = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", bool)


def opaque() -> Callable:
    """What calls a function with arguments, and hides it from torch.compile.

    A compiled function that calls backward compiles the hooks, too, and would reuse for the next gradient what it found
    for this one. Not made at import: it imports the compiler, as making any optimizer does.
    """
    return torch.compiler.disable(lambda function, *arguments: function(*arguments))


def nothing() -> None:
    """In place of a handle: Horovod calls what it can call, instead of waiting for it, and has nothing to reduce."""


def calling(compressor: object, frame: FrameType | None) -> tuple[torch.optim.Optimizer | None, torch.Tensor | None]:
    """The optimizer in or above `frame` whose compressor is `compressor`, and the parameter that it handles.

    Walking the stack costs microseconds, which every `compress` pays. `before_reduction` spares compressed gradients
    that call.
    """
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, torch.optim.Optimizer) and getattr(caller, "_compression", None) is compressor:
            return caller, parameter_in(frame)
        frame = frame.f_back
    return None, None


def parameter_in(frame: FrameType) -> torch.Tensor | None:
    """The parameter whose gradient a method of the optimizer hands over; None if `frame` is of no such method."""
    parameter = frame.f_locals.get("p")
    return parameter if isinstance(parameter, torch.Tensor) else None


def compressor_of(optimizer: Any) -> Any:
    """The optimizer's compressor; None if the optimizer is not Horovod's."""
    return getattr(optimizer, "_compression", None)


def reduced_parameters(optimizer: Any) -> list[torch.Tensor]:
    """Every parameter that has a hook and so takes part in every step, in the optimizer's order."""
    # _requires_update holds exactly these, but as a set; the groups have the order.
    return [p for group in optimizer.param_groups for p in group["params"] if p in optimizer._requires_update]


def names_of(optimizer: Any) -> dict[torch.Tensor, str]:
    """The names under which Horovod reduces gradients."""
    return optimizer._parameter_names


def label_of(optimizer: Any) -> str:
    """A name for the optimizer: the same on ranks whose models differ a little, different for each optimizer."""
    # Horovod requires different names for the gradients of two optimizers anyway. Alone it reduces none.
    return min((names_of(optimizer)[parameter] for parameter in reduced_parameters(optimizer)), default="")


def process_set_of(optimizer: Any) -> Any:
    """The process set over which gradients are reduced; None for all ranks."""
    return getattr(optimizer, "process_set", None)


def factor_of(optimizer: Any, world_size: int) -> float:
    """The factor of sums over ranks.

    Raises:
        ValueError: the reduction is neither a sum nor a mean.
    """
    # Horovod's Adasum optimizer is a class of its own, without the attribute.
    return averaging_factor(getattr(optimizer, "op", "Adasum"), world_size)


def pending_of(optimizer: Any) -> dict:
    """Gradients handed in and not yet handed back. `load_state_dict` forgets them: then it is another object."""
    return optimizer._handles


def stays_sparse(optimizer: Any, parameter: torch.Tensor) -> bool:
    """Whether Horovod reduces a parameter's gradient by itself, and never hands it to `compress`."""
    return parameter.grad is not None and parameter.grad.is_sparse and not optimizer.sparse_as_dense


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """A parameter's gradient as Horovod hands it to `compress`."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def reduced_already(optimizer: Any) -> bool:
    """Whether gradients have been reduced since the last step, and no backward pass has run since.

    Horovod counts backward passes down until it hands a gradient over, and starts again when it hands the mean back.
    """
    return optimizer._synchronized and set(optimizer._allreduce_delay.values()) == {optimizer.backward_passes_per_step}


def grouped(optimizer: Any) -> bool:
    """Whether Horovod reduces some gradients in one call, which refuses tensors of several devices."""
    return getattr(optimizer, "_groups", None) is not None


def before_synchronize(optimizer: Any, action: Callable[[], None]) -> Callable[[], None]:
    """Call `action` whenever gradients are about to be waited for, by `step` or by the user.

    Horovod offers no hook for this, and waits name by name: for ever, if another rank lacks the name.

    Returns:
        A function that undoes it.
    """

    @torch.compiler.disable  # nothing in it is worth compiling: it has no arithmetic
    def synchronize() -> None:
        action()
        before()

    before, undo = _replace(optimizer, "synchronize", synchronize)
    return undo


def before_reduction(optimizer: Any, replace: Callable[[torch.Tensor], tuple | None]) -> Callable[[], None]:
    """Offer `replace` every parameter whose gradient is about to be reduced by itself, not in a group.

    Args:
        replace: returns what Horovod gets as handle and context, or None if it is to go on as usual, with `compress`.

    Returns:
        A function that undoes it.
    """

    def submit(parameter: torch.Tensor) -> tuple:
        if looked_into() is not None:
            return hidden(offered, parameter)
        return offered(parameter)

    def offered(parameter: torch.Tensor) -> tuple:
        taken = replace(parameter)
        return before(parameter) if taken is None else taken

    hidden = opaque()
    before, undo = _replace(optimizer, "_allreduce_grad_async", submit)
    return undo


def _replace(optimizer: Any, name: str, method: Callable) -> tuple[Callable, Callable[[], None]]:
    """Give this one object, not Horovod, a method of its own; return the one before, and what undoes it."""
    this, users = weakref.ref(optimizer), vars(optimizer).get(name)  # the user may have set one, too

    def before(*arguments: Any) -> Any:
        own: Any = this()
        return getattr(type(own), name)(own, *arguments) if users is None else users(*arguments)

    def undo() -> None:
        own = this()
        if own is not None and vars(own).get(name) is method:
            delattr(own, name)
            if users is not None:
                setattr(own, name, users)

    setattr(optimizer, name, method)
    return before, undo
