"""Steps of an optimizer without its momentum: at few bits what waits in residuals is one already (docs/study.md).

The optimizer's own step does the arithmetic, but on a view: an object that shares all with the optimizer except for its
groups. Nothing of the optimizer itself changes within a step, so that nothing has to be put back.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator
from typing import Any, TypeVar

import torch

from hvd_dyncomp.checks import shown

#: At so many bits or less, the residuals are momentum enough (docs/study.md).
MOST_BITS = 2
MUCH_MOMENTUM = 0.5

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def without_momentum(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Has an optimizer step without its momentum where gradients have come at 2 bits a value or less.

        optimizer = without_momentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    What waits in residuals acts as a momentum at few bits, and two are one too many. So SGD of momentum m and dampening
    d then steps by (1 - d) / (1 - m) times its learning rate without, Adam and AdamW with a first beta of 0. Small and
    skipped tensors, of which nothing waits, keep theirs; so do all at more bits, and without error feedback or Horovod.
    The level of a step's own gradients decides. To be done on every rank or on none. When SGD's momentum comes back it
    begins at zero. `param_groups`, and all that schedules, hooks, checkpoints and scalers see, stay the user's.

    Args:
        optimizer: `torch.optim.SGD`, `Adam` or `AdamW`, or of a class that inherits the `step` of one of them; before
            `hvd.DistributedOptimizer` is made of it. Their momentum may be 0, and be raised by a schedule.

    Returns:
        The same object, whose class is derived from the one that it had.

    Raises:
        TypeError: it is another optimizer, or Horovod's, or none.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = without_momentum(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        >>> isinstance(optimizer, torch.optim.SGD), optimizer.param_groups[0]["momentum"]
        (True, 0.9)
    """
    if isinstance(optimizer, WithoutMomentum):
        return optimizer
    if not isinstance(optimizer, torch.optim.Optimizer) or inspect.unwrap(type(optimizer).step) not in _KNOWN:
        raise TypeError(
            "optimizer must be torch.optim.SGD, Adam or AdamW with torch's own step, not yet wrapped by "
            f"hvd.DistributedOptimizer, got {shown(optimizer)}; make any other optimizer with little momentum instead"
        )
    kind: Any = type(optimizer)
    optimizer.__class__ = _derived(kind)
    optimizer._patch_step_function()  # torch's: makes step hooks run around our step, as around its own
    return optimizer


def leave_out(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor], bits: float) -> None:
    """Has an optimizer, if it is one of `without_momentum`, step with gradients that have come at so many bits.

    Args:
        parameters: those whose gradients wait in residuals; the same object in every step.
    """
    if isinstance(optimizer, WithoutMomentum):
        optimizer.left_out = parameters if bits <= MOST_BITS else ()


def advice(optimizer: torch.optim.Optimizer) -> str:
    """What whoever trains at less than a bit should know of the optimizer; "" if there is nothing."""
    groups = [] if isinstance(optimizer, WithoutMomentum) else optimizer.param_groups
    momentum = max((float(group.get("momentum") or (group.get("betas") or (0.0,))[0]) for group in groups), default=0)
    if momentum < MUCH_MOMENTUM:
        return ""
    return (
        f"{type(optimizer).__name__} has a momentum of {momentum:g}, and at few bits the residuals act as a second "
        "momentum, which may harm training: call hvd_dyncomp.without_momentum(optimizer) for SGD, Adam and AdamW, "
        "before hvd.DistributedOptimizer; make other optimizers without momentum (docs/howto-levels.md)"
    )


class WithoutMomentum(torch.optim.Optimizer):
    """Comes before the class of an optimizer, and so between it and Horovod's.

    Attributes:
        left_out: the parameters whose momentum the next step leaves out, as `leave_out` has it.
    """

    left_out: Collection[torch.Tensor] = ()
    _emptied: Collection[torch.Tensor] | None = None  # parameters whose buffers are zero

    @torch._disable_dynamo  # a compiler would recompile for every view
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """As the optimizer's own."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # After the closure, not before: it may bring the gradients, and with them what is left out.
        step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(step, "hooked", False):  # torch calls the hooks around this method; a view must not repeat them
            step = step.__wrapped__
        step(_sharing(self, type(self), param_groups=list(_divided(self))) if self.left_out else self)
        self._empty()
        return loss

    def _empty(self) -> None:
        """SGD's buffers of what is left out become zero, once, so that no gradient counts twice when momentum is back.

        The state keeps its form: who joins an elastic job has to find what he has himself.
        """
        if self._emptied is self.left_out:
            return
        for group in self.param_groups:
            for parameter in group["params"] if "momentum" in _instead(group) else ():
                if parameter in self.left_out:
                    self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._emptied = self.left_out

    def state_dict(self) -> dict[str, Any]:
        """As the optimizer's own. Who asks for it may write into its tensors, as Horovod's broadcast does."""
        self._emptied = None
        return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._emptied = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled by the class that it was of: nobody finds a derived one by its name."""
        first, *others = type(self).__bases__
        if first is not WithoutMomentum:  # Horovod's class, which is derived from ours
            return super().__reduce_ex__(protocol)
        return without_momentum, (_sharing(self, others[0]),)


@functools.cache
def _derived(base: Any) -> Any:
    return type(base.__name__, (WithoutMomentum, base), {"__doc__": base.__doc__})


def _sharing(optimizer: torch.optim.Optimizer, kind: type, **others: Any) -> torch.optim.Optimizer:
    """An object of a class that shares all attributes with an optimizer, but for others."""
    view: torch.optim.Optimizer = object.__new__(kind)
    vars(view).update(vars(optimizer), **others)
    return view


def _divided(optimizer: WithoutMomentum) -> Iterator[dict[str, Any]]:
    """The optimizer's groups, and beside each one for those of its parameters whose momentum is left out."""
    for group in optimizer.param_groups:
        yield {**group, "params": [p for p in group["params"] if p not in optimizer.left_out]}
        yield {**group, **_instead(group), "params": [p for p in group["params"] if p in optimizer.left_out]}


def _instead(group: dict[str, Any]) -> dict[str, Any]:
    """What a group without momentum has in place of its own values."""
    if "betas" in group:
        first, second = group["betas"]
        return {"betas": (first * 0, second)}  # a tensor, if it was one
    momentum = group["momentum"]
    if not 0 < momentum < 1:
        return {}
    return {"lr": group["lr"] * ((1 - group["dampening"]) / (1 - momentum)), "momentum": 0.0}


# Compared by their `step`: a class with a `step` of its own may give its groups another meaning.
_KNOWN = {inspect.unwrap(kind.step) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)}
