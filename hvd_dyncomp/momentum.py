"""Optimizer steps with less momentum, or Nesterov's, as few bits deliver large values late (docs/dev/experiments.md).

The optimizer's own step does the arithmetic, but on a view: an object that shares every attribute with the optimizer
except the groups. So the optimizer itself never changes within a step, and there is nothing to restore.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hvd_dyncomp.checks import shown
from hvd_dyncomp.torch_names import check_names

logger = logging.getLogger(__name__)

#: So much of Adam's momentum is best left at so many bits or less; at more, all of it (docs/dev/experiments.md). SGD
#: that has more takes Nesterov's momentum instead, or none where none is left.
LEFT = {0.5: 0.0, 1: 0.3, 2: 0.7}
LEFT_TO_NADAM = {0.25: 0.0}  # whose momentum is Nesterov's already
MUCH_MOMENTUM = 0.5

BEFORE_HOROVOD = "call less_momentum before hvd.DistributedOptimizer"
NOT_MADE = (
    "Transformers' Trainer makes its optimizer in trainer.create_optimizer(): call "
    "less_momentum(trainer.create_optimizer()) before trainer.train()"
)
LITTLE_MOMENTUM = "make any other optimizer with little momentum instead, or use 4 bits (docs/levels.md)"

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


def less_momentum(optimizer: AnyOptimizer) -> AnyOptimizer:
    """Make an optimizer step with a momentum that suits gradients sent at 2 bits or less.

        model = DistributedDataParallel(model)
        quantizer = hvd_dyncomp.ddp.compress(model, 1)
        optimizer = less_momentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    With Horovod, call it before `hvd.DistributedOptimizer`:

        optimizer = less_momentum(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(),
                                             compression=DynamicQuantizer(1))

    At few bits, a part of a large value is delivered in later steps, which makes training with high momentum unstable.

    - SGD uses Nesterov's momentum at 1 and 2 bits, which tolerates the delay, if its momentum m is above 0.7 at 2 bits
      or above 0.3 at 1 bit. With a dampening d, its learning rate is then multiplied by (1 - d) / (1 - m d). Below 1
      bit SGD steps without momentum, at (1 - d) / (1 - m) times its learning rate. So the average progress stays the
      same, also when the level changes.
    - Adam and AdamW limit their first beta to 0.7 at 2 bits, to 0.3 at 1 bit and to 0 below.
    - NAdam, whose momentum is Nesterov's already, keeps it down to 0.5 bit. Below, its first beta is 0.
    - Small and skipped tensors keep the optimizer's own momentum, because no part of them is delivered late.

    The level of a step's own gradients decides. The optimizer finds the quantizer by its parameters, so it must step
    those that are exchanged, not copies of them. At more bits, or without error feedback or compression, every tensor
    keeps its own momentum. So it does in local steps: where the optimizer has made several steps between the two latest
    exchanges of a model, and where it has made steps before a model's first exchange, the step after the exchange, too.
    After steps without momentum, the momentum starts again at zero. Call this function on every rank or on none:
    otherwise the replicas diverge, which the comparison after `Controller.step` finds. `param_groups` keep the user's
    values, so schedulers, hooks, checkpoints and gradient scalers see no difference.

    With less momentum, a single large gradient does more harm. If training has such spikes, clip gradients.

    Args:
        optimizer: `torch.optim.SGD`, `Adam`, `AdamW` or `NAdam`, or a subclass that inherits the `step` of one of them;
            also inside a wrapper of Accelerate or Lightning, or a `ZeroRedundancyOptimizer`. Pass it before
            `hvd.DistributedOptimizer` wraps it and before a scheduler is made for it. Its momentum may be 0, and a
            scheduler may raise it.

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
            f"optimizer must be torch.optim.SGD, Adam, AdamW or NAdam with torch's own step, got {_named(inner)}"
            f"{wrapper}; {instead}"
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
    return optimizer


class Exchange(NamedTuple):
    """What a session says of its latest exchange.

    Attributes:
        number: another one for each exchange of the session.
        bits: level at which the means came, bits per value.
        parameters: those whose gradients may wait in residuals.
    """

    number: int
    bits: float
    parameters: frozenset[torch.Tensor]


def register(session: Any) -> None:
    """Let optimizers of `less_momentum` find a session by its parameters, as long as it exists.

    Args:
        session: has `latest_exchange`, an `Exchange` or None, and `_advise`, which logs a text `about` something once.
    """
    _sessions.add(weakref.ref(session, _sessions.discard))


def _exchanges() -> list[tuple[Any, Exchange]]:
    """The latest exchange of each session that has made one."""
    # A tuple of a set is made at once, whatever other threads register meanwhile.
    sessions = [session for reference in tuple(_sessions) if (session := reference()) is not None]
    return [(each, exchange) for each in sessions if (exchange := each.latest_exchange) is not None]


def watch_steppers(session: Any) -> None:
    """Have a session give the `advice` for an optimizer that makes one step of its parameters for each exchange.

    That is known at the second exchange. Of an optimizer that makes local steps nothing is said.

    Args:
        session: as in `register`; it has made an exchange.
    """
    # The hook stays registered, as torch iterates over its hooks when it calls this; no parameter must live as long.
    watched = weakref.ref(session)
    said = local = False  # whether any optimizer makes local steps
    found: MutableMapping[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()  # exchange, calls since

    @torch._disable_dynamo  # a compiled step calls this, too
    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        nonlocal said, local
        session = None if said else watched()
        if session is None:
            return
        exchange, (number, calls) = session.latest_exchange, found.get(optimizer, (0, 0))
        several = calls > _hooked_classes(type(optimizer))
        local = local or several
        if exchange.number == number:
            found[optimizer] = number, calls + 1
            return
        found[optimizer] = exchange.number, 1
        if number and not several and _steps(optimizer, exchange.parameters):
            text = advice(optimizer, exchange.bits, outer=local)
            session._advise("momentum", text)
            said = bool(text)

    register_optimizer_step_pre_hook(look)


def _hooked_classes(kind: type) -> int:
    """How often torch calls the hooks in one step, at most: for a class, and for each `step` that it calls of a base.

    Horovod's optimizer calls the user's, and a class of the user's own may call torch's.
    """
    return sum("step" in vars(each) for each in kind.__mro__ if each not in (torch.optim.Optimizer, LessMomentum))


def _steps(optimizer: torch.optim.Optimizer, parameters: Collection[torch.Tensor]) -> bool:
    return any(parameter in parameters for group in optimizer.param_groups for parameter in group["params"])


def _inner_optimizer(optimizer: Any) -> Any:
    """The optimizer that steps: Accelerate and Lightning wrap it, and so does torch's `ZeroRedundancyOptimizer`."""
    for name in ("optimizer", "optim"):
        if isinstance(inner := getattr(optimizer, name, None), torch.optim.Optimizer):
            return _inner_optimizer(inner)
    return optimizer


def _named(value: Any) -> str:
    """A value in a message: of an optimizer the class, as its text has a line for each setting of each group."""
    return type(value).__name__ if isinstance(value, torch.optim.Optimizer) else shown(value)


def advice(optimizer: torch.optim.Optimizer, bits: float, *, outer: bool = False) -> str:
    """The warning about an optimizer's momentum for training below one bit; "" if it has little, or at more bits.

    Args:
        outer: whether it steps with the changes of local steps, with which Nesterov's momentum needs no change.
    """
    inner = _inner_optimizer(optimizer)
    few = max(LEFT_TO_NADAM) if isinstance(inner, torch.optim.NAdam) else 0.5
    if isinstance(inner, LessMomentum) or bits > few:
        return ""
    groups = [group for group in inner.param_groups if not (outer and group.get("nesterov"))]
    momentum = max((float(group.get("momentum") or (group.get("betas") or (0.0,))[0]) for group in groups), default=0)
    if momentum < MUCH_MOMENTUM:
        return ""
    kind: Any = type(inner).__mro__[1] if hasattr(inner, "skip_synchronize") else type(inner)  # Horovod's is derived
    taken = inspect.unwrap(kind.step) in _KNOWN
    return (
        f"{type(optimizer).__name__} has a momentum of {momentum:g}, which may harm training at few bits, where "
        "large values are delivered late: "
        + (
            "call hvd_dyncomp.less_momentum(optimizer) where you make it (docs/levels.md)"
            if taken
            else "make it with little momentum, or use 4 bits; SGD, Adam, AdamW and NAdam can be passed to "
            "hvd_dyncomp.less_momentum (docs/levels.md)"
        )
    )


class LessMomentum(torch.optim.Optimizer):
    """The class in front of an optimizer's own class, and so between that class and Horovod's.

    Attributes:
        steps: how many it has made.
    """

    steps = 0
    # Of sessions: number of the latest exchange that it has stepped with, and whether it has made further steps since.
    _seen: MutableMapping[Any, tuple[int, bool]] | None = None
    _emptied: frozenset[torch.Tensor] = frozenset()  # parameters whose buffers of SGD are zero
    _latest: frozenset[float] = frozenset()  # what the latest step left to parameters that had less
    _words = "its own"  # what it has said of that

    @property
    def left(self) -> dict[torch.Tensor, float]:
        """How much momentum the next step leaves, at most, to parameters that do not keep all of theirs."""
        return self._left_by(_exchanges())

    def _left_by(self, exchanges: Iterable[tuple[Any, Exchange]]) -> dict[torch.Tensor, float]:
        table = LEFT_TO_NADAM if isinstance(self, torch.optim.NAdam) else LEFT
        few = []
        for session, exchange in exchanges:
            left = next((left for most, left in table.items() if exchange.bits <= most), None)
            if left is not None and self._one_step_for(session, exchange):
                few.append((left, exchange.parameters))
        found: dict[torch.Tensor, float] = {}
        for left, parameters in sorted(few, key=lambda each: -each[0]):  # of several, the least counts
            mine = [p for group in self.param_groups for p in group["params"] if p in parameters]
            if mine:
                found |= dict.fromkeys(mine, left)
        return found

    def _one_step_for(self, session: Any, exchange: Exchange) -> bool:
        """Whether the next step is the first one with an exchange, and at most one was made with that before.

        Several steps between two exchanges are local steps, whose gradients are not delivered late.
        """
        # None was seen: whoever has made steps by then may be making local ones.
        number, several = (self._seen or {}).get(session, (0, self.steps > 0))
        return exchange.number != number and not several

    @torch._disable_dynamo  # a compiler would recompile for every view
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """The optimizer's own step, with less momentum for the parameters in `left`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        exchanges = _exchanges()  # after the closure, not before: it may bring the gradients, and their level
        left = self._left_by(exchanges)
        if (found := frozenset(left.values())) != self._latest:
            self._say(found)
        step = super().step.__func__  # type: ignore[attr-defined]
        while getattr(step, "hooked", False):  # torch calls the hooks around this method; a view must not repeat them
            step = step.__wrapped__
        step(_sharing(self, type(self), param_groups=list(_divided(self, left))) if left else self)
        self._empty(frozenset(parameter for parameter in left if not left[parameter]))
        self._note(exchanges)
        self.steps += 1
        return loss

    def _say(self, found: frozenset[float]) -> None:
        """Log how the momentum changes, if it does."""
        words, self._latest = _words(found, self.param_groups), found
        if words != self._words:
            self._words = words
            logger.info("%s steps with %s momentum", type(self).__name__, words)

    def _note(self, exchanges: Iterable[tuple[Any, Exchange]]) -> None:
        """Note which exchanges the step was made with."""
        if self._seen is None:
            self._seen = weakref.WeakKeyDictionary()
        for session, exchange in exchanges:
            number, several = self._seen.get(session, (0, False))
            if number != exchange.number:
                self._seen[session] = exchange.number, False
            elif not several and self._has_gradients(exchange.parameters):
                self._seen[session] = number, True

    def _has_gradients(self, among: Collection[torch.Tensor]) -> bool:
        """Whether the step moves any of these: of two models that a loop uses in turns, one has no gradients."""
        return any(p.grad is not None and p in among for group in self.param_groups for p in group["params"])

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
        # What it did before does not count as local steps: torch.distributed.checkpoint makes a step to have a state.
        self.steps, self._seen = 0, None

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
        if first <= most:
            return {}
        return {"betas": (first.clamp(max=most) if isinstance(first, torch.Tensor) else most, second)}
    momentum, dampening, lr = group["momentum"], group["dampening"], group["lr"]
    if not most < momentum < 1 or (most and group["nesterov"]):
        return {}
    # A gradient adds up to as much as ever over all steps, and no step is longer or shorter where the level changes.
    if not most:
        return {"lr": lr * ((1 - dampening) / (1 - momentum)), "momentum": 0.0}
    return {"lr": lr * ((1 - dampening) / (1 - momentum * dampening)), "nesterov": True}


def _words(left: Collection[float], groups: Iterable[dict[str, Any]]) -> str:
    """What groups have in place of their own momentum where so much is left."""
    found = set()
    for instead in [_instead(group, most) for group in groups for most in left]:
        if instead:
            first = float(instead["betas"][0]) if "betas" in instead else instead.get("momentum")
            found.add("Nesterov's" if first is None else f"{first:g}" if first else "no")
    return " or ".join(sorted(found)) or "its own"


_sessions: set[weakref.ref[Any]] = set()

# Compared by their `step`: a class with a `step` of its own may give its groups another meaning.
_KNOWN = {
    inspect.unwrap(kind.step) for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam)
}
