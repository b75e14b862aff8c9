"""Steps that are given up between backward and step, as `optimizer.load_state_dict` does, and what comes next."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated import PLACES, WORLDS, Worker, on_ranks, places

from hvd_dyncomp import LockstepError

SIZES = {"a": 200, "b": 5, "c": 130, "d": 333}
SHAPE = {"bucket_bytes": 600}
CHOICES = st.lists(st.integers(0, 11), min_size=1, max_size=40)


def same_on_all(seen: list[list[torch.Tensor]]) -> bool:
    return all(all(map(torch.equal, seen[0], other)) for other in seen)


def clean_step(worker: Worker, step: int) -> list[torch.Tensor]:
    return list(worker.step(worker.noise(step)).values())


@pytest.mark.parametrize("place", PLACES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_ranks_that_give_up_the_same_step_go_on(place, data):
    """Messages arrive in any order; a loss is logged in between, for which all have handed in what they had."""
    ranks, hosts = PLACES[place]
    some = st.lists(st.sampled_from(sorted(SIZES)), unique=True, min_size=1)
    before, loads = data.draw(st.integers(0, 1)), data.draw(st.booleans())
    used = data.draw(some)  # the same on all: otherwise Horovod finds a name that is still under way
    twice = data.draw(st.booleans())

    def program(worker: Worker) -> list[torch.Tensor]:
        for step in range(before):
            clean_step(worker, step)
        owed = worker.quantizer.state_dict()
        for _ in range(1 + twice):
            noise = worker.noise(7)
            worker.backward({name: noise[name] for name in used})
            worker.optimizer.forget()
            if loads:
                worker.quantizer.load_state_dict(owed)
            worker.barrier("loss")
        return clean_step(worker, 8) + clean_step(worker, 9)

    seen, _ = on_ranks(ranks, program, SIZES, 4, choices=data.draw(CHOICES), hosts=hosts, **SHAPE)
    assert same_on_all(seen)


@WORLDS
@settings(deadline=None, max_examples=20)
@given(choices=CHOICES)
def test_means_that_waited_to_be_written_hold_up_nobody(ranks, hosts, choices):
    """Of gradients in memory that the program owns, too. The next step begins while a rank is busy with a loss."""

    def program(worker: Worker) -> list[torch.Tensor]:
        clean_step(worker, 0)
        worker.optimizer.zero_grad()
        owned = worker.noise(7)
        for name, gradient in owned.items():
            worker.optimizer.hand_over(worker.parameters[name], gradient[:])
        for number in range(3):
            worker.barrier(f"all is received {number}")
        worker.optimizer.forget()
        worker.backward(worker.noise(8))
        if worker.transport.rank == 0:
            worker.optimizer.synchronize()
        worker.barrier("loss")
        worker.optimizer.step()
        return [parameter.grad for parameter in worker.parameters.values()]

    seen, _ = on_ranks(ranks, program, SIZES, 4, choices=choices, hosts=hosts, **SHAPE)
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


@WORLDS
@settings(deadline=None, max_examples=30)
@given(choices=CHOICES)
def test_a_rank_that_gives_up_alone_is_named(ranks, hosts, choices):
    """The others hear it in words, sooner or later in this step or in the next: none goes on with other gradients."""

    def program(worker: Worker) -> None:
        clean_step(worker, 0)
        worker.backward(worker.noise(1))
        worker.barrier("loss")
        if worker.transport.rank == 0:
            worker.optimizer.forget()
            worker.backward(worker.noise(1))
        worker.optimizer.step()
        clean_step(worker, 2)

    with pytest.raises(LockstepError, match="rank 0 gave up the exchange|rank 0 has step 1, rank . has 2"):
        on_ranks(ranks, program, SIZES, 4, hosts=hosts, choices=choices, **SHAPE)


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
