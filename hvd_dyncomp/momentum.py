"""Optimizer steps with less momentum, or Nesterov's, as few bits deliver large values late (docs/math.md).

The optimizer's own step does the arithmetic, but on a view: an object that shares every attribute with the optimizer
except the groups. So the optimizer itself never changes within a step, and there is nothing to restore.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_dyncomp.checks import shown
from hvd_dyncomp.torch_names import check_names

logger = logging.getLogger(__name__)

#: So much of Adam's momentum is best left at so many bits or less; at more, all of it (docs/study.md). SGD that has
#: more takes Nesterov's momentum instead, or none where none is left.
LEFT = {0.5: 0.0, 1: 0.3, 2: 0.7}
MOST_BITS = max(LEFT)
MUCH_MOMENTUM = 0.5

BEFORE_HOROVOD = "call less_momentum before hvd.DistributedOptimizer"
NOT_MADE = (
    "Transformers' Trainer makes its optimizer in trainer.create_optimizer(): call "
    "less_momentum(trainer.create_optimizer()) before trainer.train()"
)
LITTLE_MOMENTUM = "make any other optimizer with little momentum instead"

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def less_momentum(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Make an optimizer step with a momentum that suits gradients sent at 2 bits or less.

        optimizer = less_momentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(controller))

    At few bits, a part of a large value is delivered in later steps, which makes training with high momentum unstable.

    - SGD uses Nesterov's momentum at 1 and 2 bits, which tolerates the delay, if its momentum m is above 0.7 at 2 bits
      or above 0.3 at 1 bit. With a dampening d, its learning rate is then multiplied by (1 - d) / (1 - m d). Below 1
      bit SGD steps without momentum, at (1 - d) / (1 - m) times its learning rate. So the average progress stays the
      same, also when the level changes.
    - Adam and AdamW limit their first beta to 0.7 at 2 bits, to 0.3 at 1 bit and to 0 below.
    - Small and skipped tensors keep the optimizer's own momentum, because no part of them is delivered late.

    The level of a step's own gradients decides. The quantizer finds the optimizer by its parameters. At more bits, or
    without error feedback or compression, every tensor keeps its own momentum. After steps without momentum, the
    momentum starts again at zero. Call this function on every rank or on none. `param_groups` keep the user's values,
    so schedulers, hooks, checkpoints and gradient scalers see no difference.

    With less momentum, a single large gradient does more harm. If training has such spikes, clip gradients.

    Args:
        optimizer: `torch.optim.SGD`, `Adam` or `AdamW`, or a subclass that inherits the `step` of one of them; also
            inside a wrapper of Accelerate or Lightning. Pass it before `hvd.DistributedOptimizer` wraps it and before a
            scheduler is made for it. Its momentum may be 0, and a scheduler may raise it.

    Returns:
        The same object. The class of the optimizer is now derived from the class that it had.

    Raises:
        TypeError: `optimizer` is another optimizer, or Horovod's, or no optimizer.
        ValueError: its `step` has been replaced, as schedulers do, or a wrapper has kept it.
        RuntimeError: this version of torch is not known.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(3))
        >>> optimizer = less_momentum(torch.optim.SGD([weight], lr=0.1, momentum=0.9))
        >>> isinstance(optimizer, torch.optim.SGD), optimizer.param_groups[0]["momentum"]
        (True, 0.9)
    """
    inner = _inner_optimizer(optimizer)
    if isinstance(inner, LessMomentum):
        return optimizer
    if not isinstance(inner, torch.optim.Optimizer) or inspect.unwrap(type(inner).step) not in _KNOWN:
        wrapper = "" if inner is optimizer else f" in a {type(optimizer).__name__}"
        horovods = hasattr(inner, "skip_synchronize")
        instead = BEFORE_HOROVOD if horovods else LITTLE_MOMENTUM if inner is not None else NOT_MADE
        raise TypeError(
            f"optimizer must be torch.optim.SGD, Adam or AdamW with torch's own step, got {shown(inner)}{wrapper}; "
            f"{instead}"
        )
    if "step" in vars(inner):
        raise ValueError(
            "optimizer must still have its own step, but it has been replaced: call less_momentum before making a "
            "learning rate scheduler or anything else that replaces it"
        )
    if "_optimizer_original_step_method" in vars(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} has kept the step of its optimizer for a gradient scaler: call "
            "less_momentum before accelerator.prepare, or less_momentum(trainer.create_optimizer()) before "
            "trainer.train()"
        )
    check_names(inner, ("_patch_step_function",))
    kind: Any = type(inner)
    inner.__class__ = _derived(kind)
    inner._patch_step_function()  # torch's: makes step hooks run around our step, as around its own
    _known_optimizers.add(cast(LessMomentum, inner))
    return optimizer


def tell_level(optimizer: torch.optim.Optimizer, parameters: frozenset[torch.Tensor], bits: float, by: object) -> None:
    """Tell an optimizer, for its next step, at how many bits its gradients came.

    No effect unless `less_momentum` made it.

    Args:
        parameters: those whose gradients wait in residuals.
        bits: level of the gradients, bits per value.
        by: who has exchanged them: of several models of one optimizer, each tells of its own parameters. Its
            `stepped` becomes true when the optimizer steps.
    """
    if isinstance(optimizer, LessMomentum):
        if optimizer.told_by is None:
            optimizer.told_by = weakref.WeakKeyDictionary()
        left = next((left for most, left in LEFT.items() if bits <= most), None)
        optimizer.told_by[by] = (frozenset(), 0.0) if left is None else (parameters, left)
        optimizer.level_known = True


def some_untold() -> bool:
    """Whether an optimizer of `less_momentum` steps that nobody has told at how many bits its gradients came."""
    return any(optimizer.steps and not optimizer.level_known for optimizer in list(_known_optimizers))


def optimizers_of(parameters: Collection[torch.Tensor]) -> list[LessMomentum]:
    """Those that `less_momentum` has made and that step any of these parameters."""
    return [optimizer for optimizer in list(_known_optimizers) if _steps(optimizer, parameters)]


def advise_stepper(parameters: Collection[torch.Tensor], tell: Callable[[str], None]) -> None:
    """Call `tell` with the `advice` for the optimizer that steps next of those that step any of these parameters.

    Args:
        tell: a method; not called if its object is gone.
    """
    tells = weakref.WeakMethod(tell)  # type: ignore[arg-type]  # mypy does not know that a method is one
    # It stays registered, as torch iterates over its hooks when it calls this; the parameters must not live as long.
    waiting = [weakref.ref(parameter) for parameter in parameters]

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if waiting and _steps(optimizer, {reference() for reference in waiting}):
            waiting.clear()
            if (method := tells()) is not None:
                method(advice(optimizer))

    register_optimizer_step_pre_hook(look)


def _steps(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor | None]) -> bool:
    return any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"])


def _inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps: Accelerate and Lightning wrap it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer


def advice(optimizer: torch.optim.Optimizer) -> str:
    """The warning about an optimizer's momentum for training below one bit; "" if it has little."""
    groups = [] if isinstance(optimizer, LessMomentum) else optimizer.param_groups
    momentum = max((float(group.get("momentum") or (group.get("betas") or (0.0,))[0]) for group in groups), default=0)
    if momentum < MUCH_MOMENTUM:
        return ""
    return (
        f"{type(optimizer).__name__} has a momentum of {momentum:g}, which may harm training at few bits, where "
        "large values are delivered late: call hvd_dyncomp.less_momentum(optimizer) where you make an SGD, Adam "
        "or AdamW; make other optimizers without momentum (docs/levels.md)"
    )


class LessMomentum(torch.optim.Optimizer):
    """The class in front of an optimizer's own class, and so between that class and Horovod's.

    Attributes:
        told_by: who has exchanged gradients since the latest step, and to which parameters how much momentum is left;
            `tell_level` adds to it.
        steps: how many it has made.
        level_known: whether `tell_level` was ever called.
    """

    told_by: MutableMapping[Any, tuple[frozenset[torch.Tensor], float]] | None = None
    steps = 0
    level_known = False
    _emptied: frozenset[torch.Tensor] = frozenset()  # parameters whose buffers of SGD are zero
    _latest: frozenset[float] = frozenset()  # what the latest step left to parameters that had less

    @property
    def left(self) -> dict[torch.Tensor, float]:
        """How much momentum the next step leaves, at most, to parameters that do not keep all of theirs."""
        own = [parameter for group in self.param_groups for parameter in group["params"]]
        return {p: left for parameters, left in (self.told_by or {}).values() for p in own if p in parameters}

    @torch._disable_dynamo  # a compiler would recompile for every view
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """The optimizer's own step, with less momentum for the parameters in `left`. The next one is told anew."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        left = self.left  # after the closure, not before: it may bring the gradients, and their level
        if (found := frozenset(left.values())) != self._latest:
            logger.info("%s steps with %s momentum", type(self).__name__, _words(found, self.param_groups))
        step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(step, "hooked", False):  # torch calls the hooks around this method; a view must not repeat them
            step = step.__wrapped__
        step(_sharing(self, type(self), param_groups=list(_divided(self, left))) if left else self)
        self._empty(frozenset(parameter for parameter in left if not left[parameter]))
        self._latest = found
        for by in self.told_by or ():
            by.stepped = True
        if self.told_by is not None:
            self.told_by.clear()
        self.steps += 1
        return loss

    def _empty(self, without: frozenset[torch.Tensor]) -> None:
        """Zero the momenta of what has stepped without: no gradient may count twice when momentum is back.

        The state keeps its form: a worker that joins an elastic job must find the same entries as in its own.
        """
        for group in self.param_groups:
            if "betas" in group:  # Adam writes its first moments in every step, with a first beta of 0 as well
                states = [self.state.get(p, {}) for p in group["params"] if p in without]
                if moments := [state["exp_avg"] for state in states if "exp_avg" in state]:
                    torch._foreach_zero_(moments)
            elif _instead(group, 0.0):
                for parameter in group["params"]:
                    if parameter in without and parameter not in self._emptied:
                        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self._emptied = without

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own. The caller may write into its tensors, as Horovod's broadcast does."""
        self._emptied = frozenset()
        return super().state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._emptied = frozenset()

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle under the original class: pickle cannot find a derived class by its name."""
        first, *others = type(self).__bases__
        if first is not LessMomentum:  # Horovod's class, which is derived from ours
            return super().__reduce_ex__(protocol)
        plain = _sharing(self, others[0])
        vars(plain).pop("step", None)  # a scheduler's
        return less_momentum, (plain,)


@functools.cache
def _derived(base: Any) -> Any:
    return type(base.__name__, (LessMomentum, base), {"__doc__": base.__doc__})


def _sharing(optimizer: torch.optim.Optimizer, kind: type, **others: Any) -> torch.optim.Optimizer:
    """An object of class `kind` that shares all attributes with an optimizer, except `others`."""
    view: torch.optim.Optimizer = object.__new__(kind)
    vars(view).update(vars(optimizer), **others)
    return view


def _divided(optimizer: LessMomentum, left: Mapping[torch.Tensor, float]) -> Iterator[dict[str, Any]]:
    """The optimizer's groups, each followed by groups of its parameters that have less momentum."""
    for group in optimizer.param_groups:
        yield {**group, "params": [p for p in group["params"] if p not in left]}
        for most in sorted(set(left.values())):
            yield {**group, **_instead(group, most), "params": [p for p in group["params"] if left.get(p) == most]}


def _instead(group: dict[str, Any], most: float) -> dict[str, Any]:
    """The values that replace a group's own where large values are delivered late.

    Args:
        most: the most momentum that Adam keeps. SGD takes Nesterov's if it has more, or none if this is 0.
    """
    if "betas" in group:
        first, second = group["betas"]
        return {"betas": (first.clamp(max=most) if isinstance(first, torch.Tensor) else min(first, most), second)}
    momentum, dampening, lr = group["momentum"], group["dampening"], group["lr"]
    if not most < momentum < 1:
        return {}
    # A gradient adds up to as much as ever over all steps, and no step is longer or shorter where the level changes.
    if not most:
        return {"lr": lr * ((1 - dampening) / (1 - momentum)), "momentum": 0.0}
    return {"lr": lr * ((1 - dampening) / (1 - momentum * dampening)), "nesterov": True}


def _words(left: Collection[float], groups: Collection[Mapping[str, Any]]) -> str:
    some = "{:g}" if any("betas" in group for group in groups) else "Nesterov's"
    return " or ".join(dict.fromkeys(some.format(most) if most else "no" for most in sorted(left))) or "its own"


_known_optimizers: weakref.WeakSet[LessMomentum] = weakref.WeakSet()

# Compared by their `step`: a class with a `step` of its own may give its groups another meaning.
_KNOWN = {inspect.unwrap(kind.step) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW)}
