"""At few bits an optimizer steps with less momentum, or Nesterov's, and nobody else sees any of it.

The oracle is torch's own optimizer with groups that were made by hand, step by step.
"""

import copy
import functools
import gc
import itertools
import logging
import pickle
import sys
import types
import weakref

import pytest
import torch
from simulated import SimulatedOptimizer, Worker, on_ranks
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import SGD, Adam, AdamW, NAdam, lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hvd_dyncomp import Averager, less_momentum
from hvd_dyncomp.momentum import Exchange, LessMomentum, advice, register, watch_steppers
from hvd_dyncomp.simulate import World

SIZES = (5, 3, 4)
WAITING = (0, 2)  # of those
STEPS = 8


class OwnStep(SGD):
    """Means something else by its groups, for all that is known."""

    def step(self, closure=None):
        return super().step(closure)


def parameters() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def distributed(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """What Horovod makes of it: an object of a derived class with the same groups, whose step calls the user's."""

    def step(self, closure=None):
        return super(type(self), self).step(closure)

    derived = type(type(optimizer).__name__, (type(optimizer),), {"step": step})
    return derived(optimizer.param_groups)


def ours(kind: type = SGD, **arguments) -> torch.optim.Optimizer:
    return distributed(less_momentum(kind(parameters(), **{"lr": 0.1, **copy.deepcopy(arguments)})))


def stock(kind: type = SGD, **arguments) -> torch.optim.Optimizer:
    return distributed(kind(parameters(), **{"lr": 0.1, **copy.deepcopy(arguments)}))


def left_at(bits: float, kind: type = SGD) -> float | None:
    """How much momentum is to be left; None: all of it."""
    if kind is NAdam:
        return 0.0 if bits < 0.5 else None
    return next((left for most, left in ((0.5, 0.0), (1, 0.3), (2, 0.7)) if bits <= most), None)


class Model:
    """As the session of a model: optimizers ask it for its latest exchange."""

    def __init__(self) -> None:
        self.latest_exchange: Exchange | None = None
        self.texts: list[str] = []
        register(self)

    def exchanges(self, bits: float, parameters) -> None:
        number = self.latest_exchange.number + 1 if self.latest_exchange else 1
        self.latest_exchange = Exchange(number, bits, frozenset(parameters))

    def _advise(self, about: str, text: str) -> None:
        self.texts += [text] * bool(text)


def few(optimizer: torch.optim.Optimizer, bits: float = 0.25) -> None:
    """Gradients have come at so many bits."""
    if getattr(optimizer, "waits", None) is None:
        optimizer.model, optimizer.waits = Model(), {parameters_of(optimizer)[index] for index in WAITING}
    optimizer.model.exchanges(bits, optimizer.waits)


def give_gradients(optimizer: torch.optim.Optimizer, step: int, order=(0, 1, 2)) -> None:
    for index, parameter in zip(order, parameters_of(optimizer), strict=True):
        parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))


class ByHand:
    """Groups as they should be: large parameters in one of their own, others with the user's values."""

    ORDER = (*WAITING, 1)

    def __init__(self, kind: type, arguments: dict) -> None:
        made = parameters()
        groups = [{"params": [made[index] for index in WAITING]}, {"params": [made[1]]}]
        self.optimizer = kind(groups, **{"lr": 0.1, **copy.deepcopy(arguments)})

    def step(self, number: int, users: dict, bits: float) -> None:
        values = {key: value for key, value in users.items() if key != "params"}
        for group in self.optimizer.param_groups:
            group.update(copy.deepcopy(values))
        large, left = self.optimizer.param_groups[0], left_at(bits, type(self.optimizer))
        if left is not None and "betas" in values:
            large["betas"] = (min(left, values["betas"][0]), values["betas"][1])
        elif left is not None and left < values["momentum"] < 1:
            momentum, dampening = values["momentum"], values["dampening"]
            if left:
                large["nesterov"] = True
                large["lr"] = values["lr"] * ((1 - dampening) / (1 - momentum * dampening))
            else:
                large["momentum"], large["lr"] = 0.0, values["lr"] * ((1 - dampening) / (1 - momentum))
        give_gradients(self.optimizer, number, self.ORDER)
        self.optimizer.step()
        buffer = "exp_avg" if "betas" in values else "momentum_buffer" if 0 < values["momentum"] < 1 else None
        for parameter in large["params"] if left == 0 and buffer else ():
            self.optimizer.state[parameter][buffer] = torch.zeros_like(parameter)

    def parameters(self) -> list[torch.Tensor]:
        found = parameters_of(self.optimizer)
        return [found[self.ORDER.index(index)] for index in range(len(SIZES))]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, found, wanted))


def values(optimizer: torch.optim.Optimizer) -> list[dict]:
    """All that a user can see of the groups: a copy."""
    return copy.deepcopy([{**group, "params": list(map(id, group["params"]))} for group in optimizer.param_groups])


# Implementations and options of torch's, and whatever moves rates and momenta between steps.

HOW = [{"foreach": False}, {"foreach": True}, {"fused": True}]
OPTIONS = {
    SGD: [
        *({"momentum": 0.75, "nesterov": True}, {"momentum": 0.75, "weight_decay": 0.1}, {"momentum": 0.0}),
        *({"momentum": 0.5, "dampening": 0.25}, {"momentum": 0.9, "maximize": True}),
        *({"momentum": 1.5}, {"momentum": 0.75, "lr": torch.tensor(0.1)}),
    ],
    Adam: [{"amsgrad": True}, {"weight_decay": 0.1}, {"maximize": True}, {"betas": (0.8, 0.9)}],
    AdamW: [{"amsgrad": True}, {"weight_decay": 0.1}, {"lr": torch.tensor(0.1)}],
    NAdam: [{}, {"weight_decay": 0.1, "decoupled_weight_decay": True}],
}
GRID = [
    (kind, {**options, **how})
    for kind, several in OPTIONS.items()
    for options, how in itertools.product(several, HOW)
    if not ("lr" in options and kind is AdamW and how.get("foreach"))  # torch refuses it
    and not (kind is NAdam and "fused" in how)  # it has none
]


class Assigned:
    """A loop that sets the rate of all groups itself."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._count = optimizer, 0

    def step(self) -> None:
        self._count += 1
        for group in self._optimizer.param_groups:
            group["lr"] = 0.1 / self._count


SCHEDULES = {
    "none": lambda optimizer: types.SimpleNamespace(step=lambda: None),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=STEPS + 1, cycle_momentum=True),
    "cyclic": lambda optimizer: lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, step_size_up=2, cycle_momentum=True),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "plateau": lambda optimizer: lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    "assigned": Assigned,
}


def advance(schedule) -> None:
    schedule.step(1.0) if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else schedule.step()


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("kind", "arguments"), GRID, ids=lambda value: getattr(value, "__name__", str(value)))
def test_steps_are_those_of_groups_made_by_hand(kind, arguments, schedule):
    """Levels change. Nobody finds other groups than stock Horovod has."""
    mine, theirs, oracle = ours(kind, **arguments), stock(kind, **arguments), ByHand(kind, arguments)
    groups, schedules = list(mine.param_groups), [SCHEDULES[schedule](each) for each in (mine, theirs)]
    for number, bits in enumerate([0.25, 0.5, 4, 3, 1, 2, 0.25, 4]):
        assert list(map(str, values(mine)[0].items()))[1:] == list(map(str, values(theirs)[0].items()))[1:]
        oracle.step(number, theirs.param_groups[0], bits)
        for optimizer in (mine, theirs):
            give_gradients(optimizer, number)
        few(mine, bits)
        mine.step()
        theirs.step()
        assert same(parameters_of(mine), oracle.parameters()), f"step {number}, {bits} bits"
        assert mine.param_groups[0] is groups[0] and len(mine.param_groups) == 1
        list(map(advance, schedules))


@pytest.mark.parametrize("arguments", [{}, {"nesterov": True}, {"dampening": 0.25}], ids=str)
def test_no_step_is_longer_where_the_level_changes(arguments):
    """With gradients that stay the same; momentum that begins at zero is as it always is."""
    optimizer = ours(momentum=0.75, **arguments)
    parameter, steps = parameters_of(optimizer)[0], []
    for bits in [8] * 60 + [3, 3, 8, 8, 2, 1, 2, 3, 8, 0.25, 0.25, *[1] * 20]:
        before = parameter.detach().clone()
        for each in parameters_of(optimizer):
            each.grad = torch.ones_like(each)
        few(optimizer, bits)
        optimizer.step()
        steps.append(float((before - parameter.detach())[0]) / 0.4)
    steps = [step / (1 - arguments.get("dampening", 0)) for step in steps]
    assert steps[59:71] == pytest.approx([1.0] * 12, abs=1e-4)
    assert max(steps[60:]) <= 1.0001 and steps[71] >= 0.43 and steps[-1] == pytest.approx(1.0, abs=1e-2)


# Hooks.


def test_hooks_are_called_as_stock_and_find_the_users_optimizer():
    seen: dict[str, list] = {}

    def calls(optimizer: torch.optim.Optimizer) -> list:
        found: list = []

        def note(what: str, hooked, arguments, _):
            assert hooked is optimizer and hooked.param_groups[0]["params"] == parameters_of(optimizer)
            found.append((what, [type(each).__name__ for each in arguments], str(values(hooked)[0]["lr"])))

        hooks = {
            "pre": optimizer.register_step_pre_hook,
            "post": optimizer.register_step_post_hook,
            "all pre": register_optimizer_step_pre_hook,
            "all post": register_optimizer_step_post_hook,
        }
        handles = [register(functools.partial(note, what)) for what, register in hooks.items()]
        give_gradients(optimizer, 0)
        few(optimizer)
        optimizer.step()
        optimizer.step(lambda: 1.0)
        for handle in handles:
            handle.remove()
        return found

    seen = {name: calls(made(momentum=0.75)) for name, made in (("ours", ours), ("stock", stock))}
    assert seen["ours"] == seen["stock"] and len(seen["ours"]) == 16
    assert calls(less_momentum(SGD(parameters(), lr=0.1))) == calls(SGD(parameters(), lr=0.1))


@pytest.mark.parametrize("inherited_first", [False, True])
def test_a_class_of_the_users_own_whose_step_is_torchs(inherited_first):
    class Fresh(SGD):
        pass

    if not inherited_first:
        SGD([torch.zeros(1)], lr=0.1)
    optimizer, calls = ours(Fresh, momentum=0.75), []
    optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    give_gradients(optimizer, 0)
    few(optimizer)
    before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
    optimizer.step()
    for factor, then, now in zip([4, 1, 4], before, parameters_of(optimizer), strict=True):
        torch.testing.assert_close(then - now, 0.1 * factor * now.grad)
    assert len(calls) == 2


def factors_of_a_step(optimizer: torch.optim.Optimizer, *, without: tuple[int, ...] = ()) -> list[float]:
    """By how many times rate and gradient a step moves each parameter, with momentum that begins at zero."""
    give_gradients(optimizer, 0)
    for index in without:
        parameters_of(optimizer)[index].grad = None
    before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
    optimizer.state.clear()  # what is in the buffers is another matter
    optimizer.step()
    moved = [then - now.detach() for then, now in zip(before, parameters_of(optimizer), strict=True)]
    grads = [parameter.grad for parameter in parameters_of(optimizer)]
    return [
        0 if grad is None else pytest.approx(float((move / grad).mean()) / 0.1, rel=1e-3)
        for move, grad in zip(moved, grads, strict=True)
    ]


def test_each_of_several_models_has_parameters_and_a_level_of_its_own():
    """In any order; what has come in no exchange since the latest step keeps its momentum."""
    for order in ((0, 1), (1, 0)):
        optimizer, models = ours(momentum=0.75), [Model(), Model()]
        waiting = [{parameters_of(optimizer)[index]} for index in WAITING]
        for bits, factors in (
            ((0.5, 0.5), [4, 1, 4]),
            ((0.5, 8), [4, 1, 1]),
            ((8, 1), [1, 1, 1.75]),  # Nesterov's
            ((None, 0.5), [1, 1, 4]),
        ):
            for model in order:
                if bits[model]:
                    models[model].exchanges(0.25, waiting[model])  # of a step that was skipped
                    models[model].exchanges(bits[model], waiting[model])
            assert factors_of_a_step(optimizer) == factors
        assert not optimizer.left
        models[1].exchanges(1, waiting[1])
        assert optimizer.left == dict.fromkeys(waiting[1], 0.3)
        models.clear()
        assert not optimizer.left, "of a model that is gone"


def test_models_that_a_loop_uses_in_turns_make_no_local_steps():
    """One optimizer steps both, each time without gradients for one of them."""
    optimizer, models = ours(momentum=0.75), [Model(), Model()]
    for number in range(6):
        turn = number % 2
        models[turn].exchanges(0.25, {parameters_of(optimizer)[WAITING[turn]]})
        moved = factors_of_a_step(optimizer, without=(WAITING[1 - turn],))
        if number != 1:  # then it has made a step before the second model's first exchange
            assert moved == ([4, 1, 0] if turn == 0 else [0, 1, 4])


def test_steps_before_a_state_is_loaded_are_no_local_steps():
    """torch.distributed.checkpoint makes one, so that there is a state to load into: a resumed run is the same run."""
    optimizer = ours(momentum=0.75)
    state = optimizer.state_dict()
    factors_of_a_step(optimizer)
    optimizer.load_state_dict(state)
    few(optimizer)
    assert factors_of_a_step(optimizer) == [4, 1, 4]


@pytest.mark.parametrize("local", [1, 2, 3, 16])
@pytest.mark.parametrize("first", [0, 1, 5])
def test_local_steps_keep_their_momentum(local, first):
    """Also the first one after an exchange; `first`: how many were made before the run's first exchange."""
    optimizer = ours(momentum=0.75)
    for _ in range(first):
        assert factors_of_a_step(optimizer) == [1, 1, 1]
    for number in range(4):
        few(optimizer)
        for step in range(local):
            less = local == 1 and step == 0 and (number > 0 or first == 0)
            # How the run goes on is known only at its second exchange: nothing was seen before the first.
            less |= local > 1 and step == number == first == 0
            assert factors_of_a_step(optimizer) == ([4, 1, 4] if less else [1, 1, 1])
    for number in range(3):  # and where they end
        few(optimizer)
        assert factors_of_a_step(optimizer) == ([1, 1, 1] if number == 0 < local - 1 else [4, 1, 4])


def test_nadam_without_momentum_steps_as_adamw_without():
    """The study compares them: below 0.5 bit AdamW of `less_momentum` ended higher than NAdam with its momentum."""
    mine = less_momentum(NAdam(parameters(), lr=0.1, weight_decay=0.1, decoupled_weight_decay=True))
    theirs = AdamW(parameters(), lr=0.1, weight_decay=0.1, betas=(0.0, 0.999))
    for number in range(5):
        few(mine)
        for optimizer in (mine, theirs):
            give_gradients(optimizer, number)
            optimizer.step()
    for index in WAITING:
        torch.testing.assert_close(parameters_of(mine)[index], parameters_of(theirs)[index])


@pytest.mark.parametrize(
    ("kind", "arguments", "said"),
    [
        (SGD, {"momentum": 0.9}, ["Nesterov's", "no", "its own"]),
        (SGD, {"momentum": 0.9, "nesterov": True}, ["no", "its own"]),
        (SGD, {}, []),
        (AdamW, {}, ["0.3", "no", "its own"]),
        (AdamW, {"betas": (0.2, 0.9)}, ["no", "its own"]),
        (NAdam, {}, ["no", "its own"]),
    ],
)
def test_the_log_says_what_changes_and_nothing_where_nothing_does(kind, arguments, said, caplog):
    optimizer = ours(kind, **arguments)
    with caplog.at_level(logging.INFO, logger="hvd_dyncomp.momentum"):
        for number, bits in enumerate([4, 1, 1, 0.25, 0.25, 4]):
            give_gradients(optimizer, number)
            few(optimizer, bits)
            optimizer.step()
    assert [record.getMessage() for record in caplog.records] == [
        f"{kind.__name__} steps with {words} momentum" for words in said
    ]


# Closures and errors.


def test_a_closure_brings_gradients_and_their_level():
    optimizer, calls = ours(momentum=0.75), []

    def closure():
        assert torch.is_grad_enabled()
        give_gradients(optimizer, 0)
        few(optimizer)
        calls.append(1)
        return 7.0

    before = parameters_of(optimizer)[0].detach().clone()
    with torch.no_grad():
        assert optimizer.step(closure) == 7.0
    assert calls == [1]
    after = parameters_of(optimizer)[0]
    torch.testing.assert_close(before - after.detach(), 0.4 * after.grad)


class Interruption(BaseException):
    pass


def interrupt(*_, **__):
    raise Interruption


@pytest.mark.parametrize("where", ["closure", "pre", "post", "base"])
def test_what_is_interrupted_leaves_nothing_behind(where, monkeypatch):
    optimizer, oracle = ours(momentum=0.75), ByHand(SGD, {"momentum": 0.75})
    users, group, then = values(optimizer), optimizer.param_groups[0], 0
    for number in range(3):
        give_gradients(optimizer, number)
        few(optimizer)
        optimizer.step()
        oracle.step(number, group, 0.25)
    state = copy.deepcopy(optimizer.state_dict())
    if where == "base":
        monkeypatch.setattr(sys.modules[SGD.__module__], "sgd", interrupt)
    hooks = {"pre": optimizer.register_step_pre_hook, "post": optimizer.register_step_post_hook}
    handle = hooks[where](interrupt) if where in hooks else None
    for parameter in parameters_of(optimizer):
        parameter.grad.zero_()
    for _ in range(2):
        with pytest.raises(Interruption):
            optimizer.step(interrupt if where == "closure" else None)
        then += where == "post"  # what the small one has of momentum moved it
    monkeypatch.undo()
    if handle is not None:
        handle.remove()
    assert values(optimizer) == users and optimizer.param_groups == [group]
    if where != "post":
        assert str(optimizer.state_dict()) == str(state)
        give_gradients(optimizer, 3)
        few(optimizer)
        optimizer.step()
        oracle.step(3, optimizer.param_groups[0], 0.25)
        assert same(parameters_of(optimizer), oracle.parameters())


# The state.


def buffers(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters_of(optimizer)]


def test_momentum_is_emptied_once_and_again_when_somebody_may_have_written_there():
    optimizer = ours(momentum=0.75)

    def step(bits: float) -> list[bool]:
        give_gradients(optimizer, 0)
        few(optimizer, bits)
        optimizer.step()
        return [bool(buffer.any()) for buffer in buffers(optimizer)]

    empty, full = [False, True, False], [True, True, True]
    assert step(8) == full
    held = buffers(optimizer)
    assert step(0.25) == empty
    assert all(buffer.any() for buffer in held), "whoever kept the state of before keeps it"
    once = buffers(optimizer)
    assert step(0.25) == empty
    assert all(now is then for now, then in zip(buffers(optimizer), once, strict=True))
    whole = optimizer.state_dict()
    for state in whole["state"].values():  # as hvd.broadcast_optimizer_state does
        state["momentum_buffer"].fill_(1.0)
    assert step(0.25) == empty
    optimizer.load_state_dict({**whole, "state": dict(enumerate({"momentum_buffer": buffer} for buffer in held))})
    assert step(0.25) == empty
    assert step(8) == full and step(0.25) == empty


@pytest.mark.parametrize(("kind", "arguments"), [(SGD, {"momentum": 0.75}), (AdamW, {})])
@pytest.mark.parametrize(("first", "second"), [(ours, stock), (stock, ours), (ours, ours)])
def test_checkpoints_of_runs_with_and_without_fit_each_other(first, second, kind, arguments):
    saved = first(kind, **arguments)
    for number in range(3):
        give_gradients(saved, number)
        few(saved)
        saved.step()
    state = pickle.loads(pickle.dumps(saved.state_dict()))  # noqa: S301  # our own
    loaded, stays = second(kind, **arguments), second(kind, **arguments)
    for optimizer in (loaded, stays):
        for parameter, value in zip(parameters_of(optimizer), parameters_of(saved), strict=True):
            parameter.data.copy_(value.data)
        optimizer.load_state_dict(copy.deepcopy(state))
        give_gradients(optimizer, 3)
        few(optimizer)
        optimizer.step()
    assert same(parameters_of(loaded), parameters_of(stays))
    if first is second:
        give_gradients(saved, 3)
        few(saved)
        saved.step()
        assert same(parameters_of(loaded), parameters_of(saved))


def test_a_group_that_is_added_steps_by_the_users_values_until_it_waits():
    optimizer, added = ours(momentum=0.75), torch.nn.Parameter(torch.zeros(4))
    give_gradients(optimizer, 0)
    few(optimizer)
    optimizer.step()
    optimizer.add_param_group({"params": [added], "lr": 0.5, "momentum": 0.5})
    for waits, factor in ((False, 1), (True, 2)):
        if waits:
            optimizer.waits |= {added}
        added.grad, before = torch.ones(4), added.detach().clone()
        few(optimizer)
        optimizer.step()
        torch.testing.assert_close(before - added.detach(), torch.full((4,), 0.5 * factor))
    assert not optimizer.state[added]["momentum_buffer"].any()


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips(fused):
    optimizer = less_momentum(SGD(parameters(), lr=0.1, momentum=0.75, fused=fused))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflow in (False, True):  # not in the first: torch's fused SGD then makes a buffer of what was in memory
        before = [parameter.detach().clone() for parameter in parameters_of(optimizer)]
        give_gradients(optimizer, 0)
        few(optimizer)
        scaler.scale(torch.ones(1))
        for parameter in parameters_of(optimizer):
            parameter.grad *= scaler.get_scale()
            parameter.grad[0] = torch.inf if overflow else 0
        scaler.step(optimizer)
        scaler.update()
        factors = [0, 0, 0] if overflow else [4, 1, 4]
        for factor, then, now in zip(factors, before, parameters_of(optimizer), strict=True):
            torch.testing.assert_close(then - now.detach(), 0.1 * factor * now.grad.nan_to_num(posinf=0))


# The object, and what is refused.


def test_it_is_the_same_object_of_one_class_and_can_be_copied():
    plain = SGD(parameters(), lr=0.1, momentum=0.75)
    optimizer = less_momentum(plain)
    assert optimizer is plain is less_momentum(plain)
    assert isinstance(optimizer, SGD) and type(optimizer).__name__ == "SGD"
    assert type(optimizer) is type(less_momentum(SGD(parameters(), lr=0.1)))
    few(optimizer)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301  # our own
        assert type(copied) is type(optimizer) and not copied.left
        assert copied.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
        assert copied.param_groups[0]["params"][0] is not optimizer.param_groups[0]["params"][0]
    wrapped = distributed(optimizer)
    assert less_momentum(wrapped) is wrapped
    for made in (wrapped, distributed(SGD(parameters(), lr=0.1))):
        with pytest.raises((pickle.PicklingError, AttributeError)):
            pickle.dumps(made)
        assert type(copy.deepcopy(made)) is type(made)


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.RMSprop(parameters(), momentum=0.9),
        torch.optim.RAdam(parameters()),
        torch.optim.LBFGS(parameters()),
        OwnStep(parameters(), lr=0.1, momentum=0.9),
        stock(momentum=0.9),
        *(None, "SGD", SGD, torch.nn.Linear(1, 1)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_others_are_refused_in_a_sentence(optimizer):
    kind = type(optimizer)
    horovods = hasattr(optimizer, "skip_synchronize")
    instead = r"call less_momentum before hvd\.DistributedOptimizer" if horovods else "make any other"
    if optimizer is None:  # as trainer.optimizer of a Trainer that has not trained
        instead = r"Transformers' Trainer makes its optimizer in trainer.create_optimizer\(\)"
    got = kind.__name__ if isinstance(optimizer, torch.optim.Optimizer) else ".*"
    with pytest.raises(TypeError, match=rf"SGD, Adam, AdamW or NAdam with torch's own step, got {got}; {instead}"):
        less_momentum(optimizer)
    assert type(optimizer) is kind


class Wrapper(torch.optim.Optimizer):
    """As Accelerate and Lightning wrap one."""

    def __init__(self, optimizer) -> None:
        self.optimizer = optimizer
        self.param_groups = optimizer.param_groups


def test_wrappers_are_looked_through():
    inner = SGD(parameters(), lr=0.1, momentum=0.9)
    wrapped = Wrapper(Wrapper(inner))
    assert less_momentum(wrapped) is wrapped is less_momentum(wrapped)
    assert type(wrapped) is Wrapper and less_momentum(inner) is inner
    with pytest.raises(TypeError, match="got RMSprop in a Wrapper; make any other"):
        less_momentum(Wrapper(torch.optim.RMSprop(parameters(), momentum=0.9)))


def test_the_shards_of_zero_are_looked_into(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(parameters(), SGD, lr=0.1, momentum=0.75)
        assert advice(optimizer, 0.25).startswith("ZeroRedundancyOptimizer has a momentum of 0.75")
        assert "call hvd_dyncomp.less_momentum(optimizer)" in advice(optimizer, 0.25)
        assert less_momentum(optimizer) is optimizer is less_momentum(optimizer)
        assert advice(optimizer, 0.25) == ""
        few(optimizer)
        assert factors_of_a_step(optimizer) == [4, 1, 4]
    finally:
        torch.distributed.destroy_process_group()


def test_a_wrapper_that_has_kept_the_step_is_refused():
    """As Accelerate's with a gradient scaler: it would go on calling the step as it was."""
    wrapped = Wrapper(SGD(parameters(), lr=0.1, momentum=0.9))
    wrapped._optimizer_original_step_method = wrapped.optimizer.step
    with pytest.raises(ValueError, match="Wrapper has kept the step of its optimizer for a gradient scaler"):
        less_momentum(wrapped)
    assert type(wrapped.optimizer) is SGD


def test_a_scheduler_that_came_first_would_see_no_step():
    """It has replaced the step, which is therefore refused; a copy has no scheduler's, as stock."""
    optimizer = SGD(parameters(), lr=0.1, momentum=0.9)
    lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(ValueError, match="before making a learning rate scheduler"):
        less_momentum(optimizer)
    assert type(optimizer) is SGD
    optimizer = less_momentum(SGD(parameters(), lr=0.1, momentum=0.9))
    lr_scheduler.StepLR(optimizer, 1)
    for copied in (copy.copy(optimizer), copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):  # noqa: S301
        assert "step" not in vars(copied) and type(copied) is type(optimizer)
    assert "step" in vars(optimizer)


@pytest.mark.parametrize(
    ("kind", "arguments", "momentum"),
    [
        (SGD, {"momentum": 0.8}, "SGD has a momentum of 0.8"),
        (SGD, {}, ""),
        (AdamW, {}, "AdamW has a momentum of 0.9"),
        (NAdam, {}, "NAdam has a momentum of 0.9"),
        (Adam, {"betas": (0.0, 0.99)}, ""),
        (torch.optim.RMSprop, {"momentum": 0.6}, "RMSprop has a momentum of 0.6"),
        (OwnStep, {"momentum": 0.9}, "OwnStep has a momentum of 0.9"),
        (torch.optim.Adagrad, {}, ""),
    ],
)
def test_what_is_said_of_an_optimizer_with_much_momentum(kind, arguments, momentum):
    optimizer, known = kind([torch.zeros(1)], lr=0.1, **arguments), kind in OPTIONS
    said = advice(optimizer, 0.25)
    assert said.startswith(momentum) and bool(said) == bool(momentum) and advice(optimizer, 1) == ""
    assert (
        "call hvd_dyncomp.less_momentum(optimizer)" if known else "with little momentum, or use 4"
    ) in said or not said
    assert bool(advice(optimizer, 0.5)) == (bool(momentum) and kind is not NAdam)
    if known:
        assert advice(less_momentum(optimizer), 0.25) == ""
    optimizer.param_groups.append({"params": [], "momentum": 0.7, "betas": None})
    assert "has a momentum of" in advice(kind(optimizer.param_groups, lr=0.1), 0.25)


@pytest.mark.parametrize("kind", [SGD, OwnStep])
@pytest.mark.parametrize("local", [1, 16])
def test_only_an_optimizer_that_steps_once_for_each_exchange_is_warned_of(kind, local):
    """And only at the second exchange, as local steps cannot be told before. A step of `OwnStep` calls hooks twice."""
    own, elsewhere = parameters(), SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    optimizer, model = kind(own, lr=0.1, momentum=0.9), Model()
    for number in range(4):
        model.exchanges(0.25, own)
        if number == 0:
            watch_steppers(model)
        for _ in range(local):
            elsewhere.step()
            optimizer.step()
        assert model.texts == [advice(optimizer, 0.25)] * (local == 1 and number > 0)


@pytest.mark.parametrize("nesterov", [False, True])
def test_an_outer_optimizer_of_local_steps_is_warned_of_unless_its_momentum_is_nesterovs(nesterov):
    own = parameters()
    inner, outer, model = AdamW(parameters()), SGD(own, lr=0.7, momentum=0.9, nesterov=nesterov), Model()
    for number in range(4):
        for _ in range(4):
            inner.step()
        model.exchanges(0.25, own)
        if number == 0:
            watch_steppers(model)
        outer.step()
    assert model.texts == [advice(outer, 0.25)] * (not nesterov)


def test_who_waits_for_an_optimizer_keeps_no_parameters():
    model, own = Model(), parameters()
    model.exchanges(0.25, own)
    watch_steppers(model)
    SGD(own, lr=0.1, momentum=0.9).step()
    waiting = weakref.ref(own[0])
    own.clear()
    model.latest_exchange = Exchange(2, 0.25, frozenset())
    gc.collect()
    assert waiting() is None


# On ranks: each has steps at one level with momentum 0.5 and rate 1, so that updates are gradients, or twice as much.
LEVELS = [0.5, 8, 0.25, 32, 0.125, 16]


def wrapped(worker: Worker) -> None:
    """As if the user had called `less_momentum`."""
    plain = less_momentum(SGD([torch.zeros(1)], lr=1.0))
    worker.optimizer.__class__ = type("SimulatedOptimizer", (SimulatedOptimizer, type(plain)), {})
    momenta(worker)


def momenta(worker: Worker) -> None:
    worker.optimizer.param_groups[0]["momentum"] = 0.5


def steps_by(factor: float, worker: Worker, step) -> bool:
    """Whether `step` moves the parameters by so many times what it has reduced."""
    parameter = worker.parameters["a"]
    before = parameter.detach().clone()
    step()
    assert parameter.grad.any()
    return torch.allclose(before - parameter.detach(), factor * parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.promise("With `less_momentum`, all ranks change the momentum in the same steps.")
@pytest.mark.parametrize("without_batch", [None, 0, 1])
def test_the_level_of_a_steps_own_gradients_decides_on_every_rank(without_batch):
    """Also on a rank that has no batch, and begins its exchange within `step`."""

    def program(worker: Worker) -> list[torch.Tensor]:
        wrapped(worker)
        found = []
        for number, bits in enumerate(LEVELS * 2):
            worker.set_level(bits)
            worker.optimizer.zero_grad()
            if number == 0 or worker.transport.rank != without_batch:
                worker.backward(worker.noise(number))
            # After a step without it, momentum is zero.
            assert steps_by(2.0 if bits < 1 else 1.0, worker, worker.optimizer.step)
            found.append(worker.parameters["a"].detach().clone())
        return found

    found, _ = on_ranks(2, program, {"a": 300}, 0.25)
    assert same(*found)


def test_gradients_that_are_assigned_are_compressed_as_all_others(caplog):
    def program(worker: Worker) -> None:
        wrapped(worker)
        for number in range(4):
            worker.optimizer.zero_grad()
            gradient = torch.full((300,), 1.0 + worker.transport.rank)
            before = worker.parameters["a"].detach().clone()
            if number == 2:
                worker.backward({"a": gradient})
            else:
                worker.parameters["a"].grad = gradient
            worker.optimizer.step()
            moved, reduced = before - worker.parameters["a"].detach(), worker.parameters["a"].grad
            torch.testing.assert_close(moved, 2 * reduced)  # without momentum
        total = worker.quantizer.meter.total()
        assert total.steps == 4 and total.sent_bytes < 1200

    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        on_ranks(2, program, {"a": 300}, 0.25)
    assert not caplog.records


@pytest.mark.parametrize("arguments", [{}, {"error_feedback": False}])
def test_it_is_left_in_where_nobody_asked_or_nothing_waits(arguments, caplog):
    def program(worker: Worker) -> None:
        (wrapped if arguments else momenta)(worker)
        for number in range(3):
            worker.backward(worker.noise(number))
            assert steps_by(1.0, worker, worker.optimizer.step) == (number == 0)
        assert worker.optimizer.state[worker.parameters["a"]]["momentum_buffer"].any()

    with caplog.at_level(logging.WARNING, logger="hvd_dyncomp"):
        on_ranks(2, program, {"a": 300}, 0.25, **arguments)
    assert ["SimulatedOptimizer has a momentum of 0.5" in r.getMessage() for r in caplog.records] == [True] * (
        not arguments
    )


def test_small_and_skipped_parameters_keep_theirs():
    """On ranks: "a" is large, "b" has 8 bits at least, "c" travels as it is."""

    def program(worker: Worker) -> None:
        wrapped(worker)
        for number in range(3):
            before = {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}
            held = {name: worker.optimizer.state[p].get("momentum_buffer") for name, p in worker.parameters.items()}
            old = {name: 0 if buffer is None else 0.5 * buffer.clone() for name, buffer in held.items()}
            worker.optimizer.zero_grad()
            worker.step(worker.noise(number))
            for name, parameter in worker.parameters.items():
                wanted = 2 * parameter.grad if name == "a" else parameter.grad + old[name]
                torch.testing.assert_close(before[name] - parameter.detach(), wanted, rtol=1e-4, atol=1e-4)
        [group] = worker.optimizer.param_groups
        assert len(group["params"]) == 3 and isinstance(worker.optimizer, LessMomentum)

    skip = {"skip": lambda name, _: name == "c"}
    on_ranks(2, program, {"a": 300, "b": 20, "c": 300}, 0.25, min_numel=100, **skip)


def accuracy_with_local_steps(transport, bits: float, changed) -> float:
    """8 rounds of 8 AdamW steps on every rank; the changes are averaged, and an outer SGD steps with them."""
    torch.manual_seed(0)
    truth, model = torch.randn(10, 32), torch.nn.Linear(32, 10)
    inner = changed(AdamW(model.parameters(), lr=0.01))
    starts = [torch.nn.Parameter(parameter.detach().clone()) for parameter in model.parameters()]
    outer = SGD(starts, lr=0.7, momentum=0.9, nesterov=True)
    averager = Averager(model.named_parameters(), bits, transport=transport, block_size=64, min_numel=10)
    batches = torch.Generator().manual_seed(1 + transport.rank)
    for step in range(64):
        inputs = torch.randn(32, 32, generator=batches)
        inner.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), (inputs @ truth.T).argmax(dim=1)).backward()
        inner.step()
        if step % 8 == 7:
            for start, now in zip(starts, model.parameters(), strict=True):
                start.grad = start.detach() - now.detach()
            averager.mean_([start.grad for start in starts])
            outer.step()
            with torch.no_grad():
                for start, now in zip(starts, model.parameters(), strict=True):
                    now.copy_(start)
    inputs = torch.randn(1000, 32, generator=torch.Generator().manual_seed(0))
    return float((model(inputs).argmax(dim=1) == (inputs @ truth.T).argmax(dim=1)).float().mean())


@pytest.mark.parametrize("bits", [2, 1, 0.25])
def test_local_steps_train_the_same_with_and_without(bits, caplog):
    """Their gradients are exact, so less momentum would only harm; and nothing advises it."""

    def program(transport) -> list[float]:
        torch.manual_seed(0)
        return [accuracy_with_local_steps(transport, bits, changed) for changed in (less_momentum, lambda same: same)]

    with caplog.at_level(logging.INFO, logger="hvd_dyncomp"):
        [(ours, theirs), _] = World(2).run(program)
    assert ours == theirs and ours > 0.5
    assert "momentum" not in caplog.text
