"""Steps that something leaves in the middle: an interruption at any call, or `optimizer.load_state_dict`.

Then a rank has the same means as without it, or an error, and refuses further steps in words until a state is loaded.
"""

import copy
import gc
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interruption import Interrupted, Interruption
from simulated import PLACES, WORLDS, RecordingWorld, Worker, on_ranks, phases, places

from hvd_dyncomp import LockstepError, averaging
from hvd_dyncomp.averaging import Averager
from hvd_dyncomp.exchange.routes import Hierarchical
from hvd_dyncomp.exchange.step import Step
from hvd_dyncomp.transport.in_process import Deadlock

SIZES = {"a": 200, "b": 5, "c": 130, "d": 333}
SHAPE = {"bucket_bytes": 600}
CHOICES = st.lists(st.integers(0, 11), min_size=1, max_size=40)
BACKGROUND = ("_work_in_background",)  # of all ranks, by whoever has the turn; in training it has a thread of its own
LEFT = r"step( \d+)? was left in the middle by"


def same_on_all(seen: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, seen[0], other)) for other in seen)


def clean_step(worker: Worker, step: int) -> list[torch.Tensor]:
    return list(worker.step(worker.noise(step)).values())


def interrupt():
    raise Interrupted


def interrupted(number: int) -> Interruption:
    return Interruption(number, interrupt, BACKGROUND)


def trained(worker: Worker, level: int, interruption: Interruption) -> list[list[torch.Tensor] | Exception]:
    """Trains three steps, the second at a level and with an interruption, after which it goes on as if nothing were.

    Returns, of each step, the means or the error.
    """
    outcomes: list[list[torch.Tensor] | Exception] = []
    optimizer = worker.optimizer
    for step in range(3):
        if step == 1 and level != 4:
            worker.set_level(level)
        here = interruption if step == 1 and worker.transport.rank == 0 else interrupted(-1)
        optimizer.zero_grad()
        try:
            for name, gradient in worker.noise(step).items():
                here.hits(lambda name=name, gradient=gradient: optimizer.backward(worker.parameters[name], gradient))
            if here.hits(optimizer.synchronize):
                optimizer.synchronize()
            outcomes.append([p.grad.clone() for p in worker.parameters.values()])
        except RuntimeError as error:
            outcomes.append(error)
            optimizer.forget()
            optimizer._means.clear()
        optimizer._synchronized = False
    return outcomes


@pytest.mark.promise("After an interruption means are right, or the rank refuses steps.")
@places("2", "3", "2x2")
@pytest.mark.parametrize("level", [4, 32], ids=["compressed", "released"])
@pytest.mark.parametrize("every", [17, pytest.param(1, marks=pytest.mark.soak)])
def test_an_interruption_at_every_call(ranks, hosts, level, every):
    """At so many of them, one after the other: of up to 1,900, a whole run for each takes minutes."""

    def run(number: int):
        interruption = interrupted(number)
        seen, _ = on_ranks(ranks, lambda worker: trained(worker, level, interruption), SIZES, 4, hosts=hosts, **SHAPE)
        return seen, interruption.calls

    gc.collect()  # what earlier tests have left would be finalized within, and counted
    expected, calls = run(-1)
    assert calls > 50
    refused = unheard = 0
    numbers = range(ranks, calls, every)
    for number in numbers:
        seen, reached = run(number)
        assert reached > number
        for rank, outcomes in enumerate(seen):
            for step, means in enumerate(outcomes):
                if not isinstance(means, Exception):
                    # At 32 bits there is no message that could tell the others in that step already.
                    late = step == 1 and level == 32 and rank > 0 and isinstance(seen[0][2], Exception)
                    assert late or all(map(torch.equal, means, expected[rank][step])), f"interrupted at call {number}"
                elif rank == 0:
                    assert step > 0 and re.search(LEFT, str(means)), (number, means)
        # No rank goes on when another one does not.
        assert len({isinstance(outcomes[2], Exception) for outcomes in seen}) == 1, number
        refused += isinstance(seen[0][2], Exception)
        # Between two collectives of an exchange there are a few calls after which the others hear nothing in this step.
        unheard += any("nobody can go on" in str(outcomes[1]) for outcomes in seen)
    assert refused and (every > 1 or refused < calls) and unheard <= 0.05 * len(numbers) + 1


def refused(worker: Worker, step: int) -> None:
    """A step that raises an error in words, here and on the others."""
    with pytest.raises(RuntimeError, match=f"{LEFT}|cannot use its quantizer") as error:
        clean_step(worker, step)
    worker.optimizer.give_up()
    worker.optimizer._means.clear()
    assert "load_state_dict" in str(error.value) or isinstance(error.value, LockstepError)


@pytest.mark.promise("A step that `optimizer.load_state_dict` abandons is an error everywhere.")
@pytest.mark.parametrize("place", PLACES)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_a_step_that_horovod_forgets_is_an_error_on_every_rank_until_a_state_is_loaded(place, data):
    """Messages arrive in any order; a loss is logged in between, for which all have handed in what they had."""
    ranks, hosts = PLACES[place]
    some = st.lists(st.sampled_from(sorted(SIZES)), unique=True, min_size=1)
    before = data.draw(st.integers(0, 1))
    used = data.draw(some)  # the same on all: otherwise Horovod finds a name that is still under way

    def program(worker: Worker) -> list[torch.Tensor]:
        for step in range(before):
            clean_step(worker, step)
        owed = worker.quantizer.state_dict()
        noise = worker.noise(7)
        worker.backward({name: noise[name] for name in used})
        worker.barrier("loss")
        worker.optimizer.forget()
        refused(worker, 8)
        refused(worker, 8)
        worker.quantizer.load_state_dict(owed)
        return clean_step(worker, 8) + clean_step(worker, 9)

    seen, _ = on_ranks(ranks, program, SIZES, 4, choices=data.draw(CHOICES), hosts=hosts, **SHAPE)
    assert same_on_all(seen)


@WORLDS
def test_a_state_that_is_loaded_brings_back_what_was_owed(ranks, hosts):
    """After a rollback of optimizer and quantizer, what follows is what would have followed without the lost step."""

    def program(worker: Worker, lost: bool) -> list[torch.Tensor]:
        clean_step(worker, 0)
        owed = copy.deepcopy(worker.quantizer.state_dict())
        if lost:
            worker.backward(worker.noise(7))
            worker.optimizer.give_up()
            worker.quantizer.load_state_dict(owed)
        return clean_step(worker, 1)

    with_loss, _ = on_ranks(ranks, lambda worker: program(worker, True), SIZES, 4, hosts=hosts, **SHAPE)
    without, _ = on_ranks(ranks, lambda worker: program(worker, False), SIZES, 4, hosts=hosts, **SHAPE)
    for mine, expected in zip(with_loss, without, strict=True):
        assert all(map(torch.equal, mine, expected))


@places("2", "2x2")
def test_attaching_while_gradients_are_in_flight(ranks, hosts):
    def program(worker: Worker) -> list[torch.Tensor]:
        clean_step(worker, 0)
        worker.backward(worker.noise(1))
        with pytest.raises(ValueError, match="attach must be called between steps"):
            worker.quantizer.attach(worker.optimizer)
        worker.optimizer.step()
        worker.quantizer.attach(worker.optimizer)
        worker.backward(worker.noise(2))
        worker.optimizer.give_up()
        worker.quantizer.attach(worker.optimizer)
        return clean_step(worker, 3)

    seen, _ = on_ranks(ranks, program, SIZES, 4, hosts=hosts, **SHAPE)
    assert same_on_all(seen)


class Lost(Exception):
    """A rank's process has ended."""


class Losing(RecordingWorld):
    """A rank is lost between its first message and the second."""

    def start(self, rank, kind, tensor, splits, name, arriving):
        if rank == 1 and name.endswith(".gather"):
            raise Lost
        return super().start(rank, kind, tensor, splits, name, arriving)


def test_loading_a_state_does_not_wait_for_ever_for_a_rank_that_is_lost():
    """What is done in the background may be further than what was waited for."""

    def program(transport) -> str:
        worker = Worker(transport, {"a": 200}, 4)
        owed = worker.quantizer.state_dict()
        worker.backward(worker.noise(0))
        with pytest.raises((RuntimeError, Lost, Deadlock)) as error:
            if transport.rank == 0:
                worker.quantizer.load_state_dict(owed)
            else:
                worker.optimizer.step()
        return f"{error.type.__name__}: {error.value}"

    # With these choices background work is done whenever the turn changes.
    said = Losing(3, choices=[0]).run(program)
    assert said[0].startswith("RuntimeError: other ranks have not left step 0"), said


def outcomes_of_averagers(world: RecordingWorld) -> list[list[str]]:
    """Per rank, what three steps of an averager came to, in each of which something is raised."""

    def program(transport) -> list[str]:
        named = [("a", torch.zeros(200)), ("b", torch.zeros(130))]
        averager, said = Averager(named, 4, transport=transport), []
        for _ in range(3):
            with pytest.raises((Interrupted, RuntimeError)) as error:
                averager.mean_([torch.ones(200), torch.ones(130)])
            said.append(f"{error.type.__name__}: {error.value}")
        return said

    return world.run(program)


class Interrupting(RecordingWorld):
    """The first wait of rank 0 in a step is interrupted."""

    waited = False

    def block(self, rank, collective):
        if rank == 0 and not self.waited and collective.name != "hvd_dyncomp.averager":
            self.waited = True
            raise Interrupted
        super().block(rank, collective)


def assert_rank_0_is_named(seen: list[list[str]]) -> None:
    """By all, in the step that it has left; from then on each refuses."""
    first, *others = seen
    assert first[0].startswith("Interrupted") and all(re.search(LEFT, each) for each in first[1:]), first
    for said in others:
        assert re.match("LockstepError: bucket b: rank 0 gave up the exchange", said[0]), said
        assert all(re.search(LEFT, each) for each in said[1:]), said


def test_a_step_that_is_left_before_the_others_begin_it():
    """Its greeting is still under way when the next one is due."""
    world = Interrupting(3)
    assert_rank_0_is_named(outcomes_of_averagers(world))
    for rank in range(3):
        assert len(world.messages(".introduction", rank)) == 2, "not told in words in each later step"


@pytest.mark.parametrize("sums_tickets", [False, True])
def test_nobody_takes_what_a_rank_did_not_hand_over_for_zeros(sums_tickets, monkeypatch):
    """Interrupted between two gradients. All that the others wait for goes out."""
    real = Step.add

    def add(step: Step, slot, *arguments) -> None:
        if step._plan.source.rank == 0 and slot.name == "a":
            raise Interrupted
        real(step, slot, *arguments)

    monkeypatch.setattr(Step, "add", add)
    monkeypatch.setattr(averaging._Tensors, "sums_tickets", sums_tickets)
    assert_rank_0_is_named(outcomes_of_averagers(RecordingWorld(3)))


@places("2", "3", "2x2")
def test_gradients_of_a_step_that_is_left_are_not_written(ranks, hosts):
    """Their means have come, and wait until all gradients have been read: the program owns their memory, too."""

    def program(worker: Worker) -> None:
        clean_step(worker, 0)
        owed, owned = worker.quantizer.state_dict(), worker.noise(1)
        for name in "dcb":
            worker.optimizer.hand_over(worker.parameters[name], owned[name].view(-1))
        for turn in range(6):
            worker.barrier(str(turn))
        worker.quantizer.load_state_dict(owed)
        worker.barrier("all have left it")
        for name, expected in worker.noise(1).items():
            assert torch.equal(owned[name], expected), name

    # With these choices a rank that has the turn keeps it, and background work is done whenever the turn changes.
    _, world = on_ranks(ranks, program, SIZES, 4, hosts=hosts, choices=[0], bucket_bytes=1)
    assert world.messages(f"d.{phases(ranks, hosts)[-1]}")


def test_an_interruption_of_which_the_others_do_not_hear_is_raised_at_once(monkeypatch):
    """It hits one of the few calls between two collectives: this rank would wait for ranks that wait for it."""
    real = Hierarchical.collectives

    def collectives(route: Hierarchical, *arguments):
        if route._bucket.rank == 0 and route._bucket.name == "a":
            raise Interrupted
        return real(route, *arguments)

    def program(transport) -> type[BaseException]:
        named = [("a", torch.zeros(200)), ("b", torch.zeros(130))]
        averager = Averager(named, 4, transport=transport, bucket_bytes=1)
        with pytest.raises((Interrupted, LockstepError, Deadlock)) as error:
            averager.mean_([torch.ones(200), torch.ones(130)])
        return error.type

    monkeypatch.setattr(Hierarchical, "collectives", collectives)
    ranks, hosts = PLACES["2x2"]
    assert RecordingWorld(ranks, hosts=hosts).run(program)[0] is Interrupted
