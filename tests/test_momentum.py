"""At 2 bits and less an optimizer steps without its momentum, and nobody else sees any of it."""

import copy
import gc
import logging
import weakref

import pytest
import torch
from exchange.simulated import SimulatedOptimizer, Worker, on_ranks, set_level

from hvd_dyncomp import LockstepError
from hvd_dyncomp.momentum import Momentum, momentum_of

SIZES = (5, 3)


class OwnStep(torch.optim.SGD):
    """Means something else by its groups, for all that is known."""

    def step(self, closure=None):
        return super().step(closure)


class Inherited(torch.optim.SGD):
    pass


def made(kind: type[torch.optim.Optimizer], **arguments) -> torch.optim.Optimizer:
    """An optimizer as Horovod makes it: of a derived class, whose step calls the user's."""

    def step(self, closure=None):
        return super(type(self), self).step(closure)

    kind([torch.zeros(1)], lr=0.1)  # torch changes a class when it makes the first of it, which Horovod's user has
    derived = type(kind.__name__, (kind,), {"step": step})
    return derived([torch.nn.Parameter(torch.linspace(-1, 1, size)) for size in SIZES], **{"lr": 0.1, **arguments})


def trained(optimizer: torch.optim.Optimizer, steps: range = range(6)) -> list[torch.Tensor]:
    for step in steps:
        for group in optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                generator = torch.Generator().manual_seed(10 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [p.detach().clone() for p in parameters_of(optimizer)]


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def less(optimizer: torch.optim.Optimizer, bits: float = 1, waiting: list[torch.Tensor] | None = None) -> Momentum:
    momentum = Momentum(optimizer, parameters_of(optimizer) if waiting is None else waiting, 0, replace=True)
    momentum.choose(bits)
    return momentum


SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
PAIRS = [
    (SGD, {"momentum": 0.75}, {"lr": 0.4}),
    (Inherited, {"momentum": 0.75}, {"lr": 0.4}),
    (SGD, {"momentum": 0.75, "nesterov": True, "weight_decay": 0.1}, {"lr": 0.4, "weight_decay": 0.1}),
    (SGD, {"momentum": 0.5, "dampening": 0.25}, {"lr": 0.15}),
    (SGD, {"momentum": 0.75, "foreach": True, "maximize": True}, {"lr": 0.4, "maximize": True}),
    (SGD, {"weight_decay": 0.1}, {"weight_decay": 0.1}),
    (ADAM, {"amsgrad": True}, {"betas": (0.0, 0.999), "amsgrad": True}),
    (ADAMW, {"betas": (0.8, 0.9)}, {"betas": (0.0, 0.9)}),
]


@pytest.mark.parametrize(("kind", "arguments", "same_as"), PAIRS)
def test_a_step_without_is_that_of_an_optimizer_that_has_none(kind, arguments, same_as):
    optimizer = made(kind, **arguments)
    users = copy.deepcopy([{**group, "params": None} for group in optimizer.param_groups])
    keep = less(optimizer)
    found, wanted = trained(optimizer), trained(made(kind, **same_as))
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    assert [{**group, "params": None} for group in optimizer.param_groups] == users
    assert keep.left_out


@pytest.mark.parametrize(("kind", "arguments", "same_as"), PAIRS)
@pytest.mark.parametrize("waits", [[0], [1], []])
def test_parameters_of_which_nothing_waits_keep_theirs(waits, kind, arguments, same_as):
    optimizer, stock, without = made(kind, **arguments), made(kind, **arguments), made(kind, **same_as)
    [group] = groups = list(optimizer.param_groups)
    users = {**group, "params": list(group["params"])}
    keep = less(optimizer, waiting=[group["params"][index] for index in waits])
    seen = []
    optimizer.register_step_post_hook(lambda *_: seen.append(len(optimizer.param_groups)))
    found, of_stock, of_without = (trained(each) for each in (optimizer, stock, without))
    wanted = [(of_without if index in waits else of_stock)[index] for index in range(len(SIZES))]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-7)
    # Whoever comes after a step sees the user's groups, and these very ones.
    assert set(seen) == {1}
    assert optimizer.param_groups[0] is groups[0] and {**group, "params": list(group["params"])} == users
    assert keep.left_out


@pytest.mark.parametrize("bits", [3, 4, 32])
@pytest.mark.parametrize("kind", [SGD, ADAMW])
def test_above_two_bits_nothing_is_touched(kind, bits):
    arguments = {"momentum": 0.9} if kind is SGD else {}
    optimizer = made(kind, **arguments)
    keep = less(optimizer, bits)
    assert all(map(torch.equal, trained(optimizer), trained(made(kind, **arguments))))
    assert not keep.left_out


@pytest.mark.parametrize(
    ("kind", "replace", "advice"),
    [(OwnStep, True, "try it"), (torch.optim.RMSprop, True, "try it"), (SGD, False, "replace_momentum=True")],
)
def test_an_optimizer_that_is_left_alone_is_warned_of_once(kind, replace, advice, caplog):
    optimizer = made(kind, momentum=0.9)
    with caplog.at_level(logging.INFO, logger="hvd_dyncomp"):
        keep = Momentum(optimizer, parameters_of(optimizer), 0, replace=replace)
        for bits in (4, 1, 0.25, 0.25):
            keep.choose(bits)
            assert len(caplog.records) == (bits < (4 if replace else 1))
    assert all(map(torch.equal, trained(optimizer), trained(made(kind, momentum=0.9))))
    [record] = caplog.records
    assert record.levelname == "WARNING" and f"{kind.__name__} has a momentum of 0.9" in record.getMessage()
    assert advice in record.getMessage()


@pytest.mark.parametrize(("rank", "momentum", "said"), [(0, 0.9, 1), (1, 0.9, 0), (0, 0.0, 0)])
def test_what_is_done_is_said_once(rank, momentum, said, caplog):
    optimizer = made(SGD, momentum=momentum)
    keep = Momentum(optimizer, parameters_of(optimizer), rank, replace=True)
    with caplog.at_level(logging.INFO, logger="hvd_dyncomp"):
        for bits in (4, 1, 4, 1):
            keep.choose(bits)
    assert [record.levelname for record in caplog.records] == ["INFO"] * said


@pytest.mark.parametrize("arguments", [{"momentum": 0.75}, {"momentum": 0.75, "nesterov": True}])
def test_momentum_grows_anew_when_it_comes_back(arguments):
    optimizer = made(SGD, **arguments)
    keep = less(optimizer, 4)
    trained(optimizer, range(3))
    keep.choose(1)
    trained(optimizer, range(3, 5))
    keep.choose(4)
    fresh = made(SGD, **arguments)
    for mine, theirs in zip(optimizer.param_groups[0]["params"], fresh.param_groups[0]["params"], strict=True):
        theirs.data.copy_(mine.data)
    torch.testing.assert_close(trained(optimizer, range(5, 8)), trained(fresh, range(5, 8)), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("kind", "arguments"), [(SGD, {"momentum": 0.9}), (SGD, {}), (ADAM, {})])
def test_the_state_has_the_same_form(kind, arguments):
    """Elastic Horovod broadcasts it tensor by tensor to workers that have just made theirs."""
    optimizer, stock = made(kind, **arguments), made(kind, **arguments)
    keep = less(optimizer)
    trained(optimizer)
    trained(stock)

    def form(state: dict) -> dict:
        return {key: {name: getattr(value, "shape", None) for name, value in own.items()} for key, own in state.items()}

    mine, theirs = optimizer.state_dict(), stock.state_dict()
    # Without momentum torch may write down that there is no buffer, or nothing.
    assert form(mine["state"]) == form(theirs["state"])
    assert mine["param_groups"] == theirs["param_groups"]
    assert keep.left_out


def test_schedules_see_and_change_the_users_values():
    optimizer, stock = made(SGD, momentum=0.75), made(SGD, lr=0.4)
    keep = less(optimizer)
    ours, theirs = (torch.optim.lr_scheduler.StepLR(each, 1, gamma=0.5) for each in (optimizer, stock))
    for step in range(4):
        torch.testing.assert_close(trained(optimizer, range(step, step + 1)), trained(stock, range(step, step + 1)))
        ours.step()
        theirs.step()
        assert ours.get_last_lr() == [0.1 * 0.5 ** (step + 1)] == [optimizer.param_groups[0]["lr"]]
    assert keep.left_out


@pytest.mark.parametrize("large", [1, 2])
@pytest.mark.parametrize("look", ["state_dict", "step", "remove"])
def test_a_step_that_is_interrupted_leaves_the_users_values(look, large):
    optimizer = made(SGD, momentum=0.75)
    keep = less(optimizer, waiting=parameters_of(optimizer)[:large])

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    if look == "state_dict":
        [group] = optimizer.state_dict()["param_groups"]
    elif look == "step":
        trained(optimizer, range(1))
        [group] = optimizer.param_groups
    else:
        keep.remove()
        [group] = optimizer.param_groups
    assert (group["lr"], group["momentum"], len(group["params"])) == (0.1, 0.75, len(SIZES))


def test_an_outer_step_that_turns_out_to_have_more_bits_takes_nothing_away():
    """Horovod's step begins with what is known of the step before; and a state may have been loaded in between."""
    optimizer = made(SGD, momentum=0.75)
    keep = less(optimizer)
    trained(optimizer, range(2))
    state = {"momentum_buffer": torch.ones(SIZES[0])}
    optimizer.state[optimizer.param_groups[0]["params"][0]].update(state)
    keep._begin_step()  # the outer one
    keep.put_back()  # before gradients are waited for
    keep.choose(32)
    optimizer.param_groups[0]["params"][0].grad.zero_()
    optimizer.step()
    torch.testing.assert_close(state["momentum_buffer"], torch.full((SIZES[0],), 0.75))


@pytest.mark.parametrize("plain_first", [False, True])
def test_what_a_class_is_does_not_depend_on_what_was_made_before(plain_first):
    class Fresh(torch.optim.SGD):
        pass

    if plain_first:
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer = made(Fresh, momentum=0.75)
    keep = less(optimizer)
    trained(optimizer, range(1))
    assert keep._without is not None


@pytest.mark.parametrize("group", [{"betas": None}, {"betas": ()}, {"momentum": "0.9"}])
def test_groups_of_others_may_hold_anything(group):
    optimizer = made(torch.optim.Adagrad)
    optimizer.param_groups[0].update(group)
    less(optimizer, 8)
    if "betas" in group:
        less(optimizer, 0.25)


def test_what_was_set_during_a_step_stays():
    optimizer = made(SGD, momentum=0.75)
    keep = less(optimizer)
    optimizer.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=7.0))
    optimizer.register_step_pre_hook(lambda optimizer, *_: optimizer.param_groups[0].update(lr=5.0))
    trained(optimizer, range(1))
    assert optimizer.param_groups[0]["lr"] == 7.0 and optimizer.param_groups[0]["momentum"] == 0.75
    assert keep.left_out


def test_it_is_gone_with_its_owner():
    optimizer = made(SGD, momentum=0.9)
    keep = less(optimizer)
    alive = weakref.ref(keep)
    del keep
    gc.collect()
    assert alive() is None
    assert all(map(torch.equal, trained(optimizer), trained(made(SGD, momentum=0.9))))


@pytest.mark.parametrize(
    ("kind", "arguments", "momentum"),
    [
        (SGD, {"momentum": 0.8}, 0.8),
        (SGD, {}, 0.0),
        (ADAMW, {}, 0.9),
        (ADAM, {"betas": (0.0, 0.99)}, 0.0),
        (torch.optim.RMSprop, {"momentum": 0.3}, 0.3),
        (torch.optim.Adagrad, {}, 0.0),
    ],
)
def test_what_an_optimizer_carries_on(kind, arguments, momentum):
    assert momentum_of(kind([torch.zeros(1)], lr=0.1, **arguments)) == momentum


def test_the_most_of_the_groups_counts():
    groups = [{"params": [torch.zeros(1)], "momentum": 0.9}, {"params": [torch.zeros(1)]}]
    assert momentum_of(torch.optim.SGD(groups, lr=0.1)) == 0.9


# On ranks: each has steps at one level with momentum 0.5 and rate 1, so that updates are gradients, or twice as much.
LEVELS = [1, 4, 0.25, 32, 2, 8]


def steps_by(factor: float, worker: Worker, step) -> bool:
    """Whether `step` moves the parameters by so many times what it has reduced."""
    parameter = worker.parameters["a"]
    before = parameter.detach().clone()
    step()
    assert parameter.grad.any()
    return torch.allclose(before - parameter.detach(), factor * parameter.grad, rtol=1e-4, atol=1e-4)


def momenta(worker: Worker) -> None:
    worker.optimizer.param_groups[0]["momentum"] = 0.5


@pytest.mark.parametrize("without_batch", [None, 0, 1])
def test_the_level_of_a_steps_own_gradients_decides_on_every_rank(without_batch):
    """Also on a rank that has no batch, and begins its exchange within `step`."""

    def program(worker: Worker) -> list[torch.Tensor]:
        momenta(worker)
        parameters = []
        for number, bits in enumerate(LEVELS * 2):
            set_level(worker.controller, bits)
            worker.optimizer.zero_grad()
            if number == 0 or worker.transport.rank != without_batch:
                worker.backward(worker.noise(number))
            # After a step without it, momentum is zero.
            assert steps_by(2.0 if bits <= 2 else 1.0, worker, worker.optimizer.step)
            parameters.append(worker.parameters["a"].detach().clone())
        return parameters

    found, _ = on_ranks(2, program, {"a": 300}, 1, replace_momentum=True)
    assert all(map(torch.equal, *found))


def test_a_step_that_fails_leaves_the_users_values():
    """Where its gradients were not in flight before, so that the step before has the say until they are."""

    def program(worker: Worker) -> dict:
        momenta(worker)
        worker.step(worker.noise(0))
        if worker.transport.rank == 1:
            set_level(worker.controller, 8)
        with pytest.raises(LockstepError):
            worker.optimizer.step()
        return worker.optimizer.param_groups[0]

    for group in on_ranks(2, program, {"a": 300}, 1, replace_momentum=True)[0]:
        assert (group["lr"], group["momentum"]) == (1.0, 0.5)


def test_gradients_that_are_clipped_in_between_are_those_that_were_reduced():
    def program(worker: Worker) -> None:
        momenta(worker)
        worker.backward(worker.noise(0))
        worker.optimizer.synchronize()
        reduced = worker.parameters["a"].grad.clone()
        torch.nn.utils.clip_grad_norm_(worker.parameters.values(), 0.5)
        assert steps_by(2.0, worker, worker.optimizer.step)  # which does not synchronize again
        assert reduced.norm() > 0.5 > worker.parameters["a"].grad.norm() - 1e-3

    on_ranks(2, program, {"a": 300}, 1, replace_momentum=True)


@pytest.mark.parametrize("arguments", [{}, {"replace_momentum": True, "error_feedback": False}])
def test_it_is_left_in_where_the_user_says_so_or_nothing_waits(arguments):
    def program(worker: Worker) -> None:
        momenta(worker)
        for number in range(3):
            worker.backward(worker.noise(number))
            assert steps_by(1.0, worker, worker.optimizer.step) == (number == 0)
        assert worker.optimizer.state[worker.parameters["a"]]["momentum_buffer"].any()

    on_ranks(2, program, {"a": 300}, 1, **arguments)


def test_another_optimizer_gets_its_own_and_the_first_one_is_let_go():
    def program(worker: Worker) -> None:
        momenta(worker)
        worker.step(worker.noise(0))
        first = worker.optimizer
        worker.optimizer = SimulatedOptimizer(worker.parameters, worker.quantizer, worker.transport)
        momenta(worker)
        worker.quantizer.attach(worker.optimizer)
        worker.backward(worker.noise(1))
        assert steps_by(2.0, worker, worker.optimizer.step)
        assert not first._optimizer_step_pre_hooks and not first._optimizer_step_post_hooks

    on_ranks(2, program, {"a": 300}, 1, replace_momentum=True)


def test_small_and_skipped_parameters_keep_theirs():
    """On ranks: "a" is large, "b" has 8 bits at least, "c" travels as it is."""

    def program(worker: Worker) -> None:
        momenta(worker)
        for number in range(3):
            before = {name: parameter.detach().clone() for name, parameter in worker.parameters.items()}
            buffers = {name: worker.optimizer.state[p].get("momentum_buffer") for name, p in worker.parameters.items()}
            old = {name: 0 if buffer is None else 0.5 * buffer.clone() for name, buffer in buffers.items()}
            worker.optimizer.zero_grad()
            worker.step(worker.noise(number))
            for name, parameter in worker.parameters.items():
                wanted = 2 * parameter.grad if name == "a" else parameter.grad + old[name]
                torch.testing.assert_close(before[name] - parameter.detach(), wanted, rtol=1e-4, atol=1e-4)
        [group] = worker.optimizer.param_groups
        assert len(group["params"]) == 3

    skip = {"skip": lambda name, _: name == "c"}
    on_ranks(2, program, {"a": 300, "b": 20, "c": 300}, 1, replace_momentum=True, min_numel=100, **skip)
