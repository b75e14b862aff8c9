"""Gradients travel while backward goes on: what has come is sent, reduced and delivered before anybody waits for it."""

import gc

import pytest
import torch
from simulated import Worker, mean_of, noise, on_ranks

SIZES = {name: 130 for name in "abcde"}
ONE_EACH = {"bucket_bytes": 1}  # a bucket for every parameter


def is_delivered(worker: Worker, name: str, step: int) -> bool:
    expected = mean_of(name, SIZES[name], step, range(worker.transport.size), worker.transport.size)
    return bool((worker.parameters[name].grad - expected).norm() <= 2e-3 * expected.norm())


@pytest.mark.parametrize("ranks", [2, 3])
def test_calls_in_backward_do_all_that_is_possible(ranks):
    """The network is as fast as can be, and nothing happens in the background: the calls themselves carry it on."""

    def program(worker: Worker) -> list[list[str]]:
        seen = []
        for name in "edcba":
            gradient = noise(name, SIZES[name], worker.transport.rank, 0)
            worker.optimizer.backward(worker.parameters[name], gradient)
            worker.barrier(name)  # until all have come as far
            done = [other for other in "edcba" if worker.parameters[other].grad is not None]
            seen.append([other for other in done if is_delivered(worker, other, 0)])
        worker.optimizer.step()
        assert all(is_delivered(worker, name, 0) for name in SIZES)
        return seen

    results, _ = on_ranks(ranks, program, SIZES, 16, **ONE_EACH)
    # A gradient's message leaves with it, or with the next one where greetings are still under way. The next but one
    # finds that it has arrived; three ranks need one message more.
    late = 2 if ranks == 2 else 3
    for seen in results:
        for i in range(late, 5):
            assert set("edcba"[: i + 1 - late]) <= set(seen[i]), seen


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_has_come_goes_on_in_the_background(ranks):
    """After its last gradient a rank does something else; all has arrived when it asks."""

    def program(worker: Worker) -> bool:
        worker.backward(worker.noise(0))
        for turn in range(4):
            worker.barrier(str(turn))
        early = all(is_delivered(worker, name, 0) for name in SIZES)
        worker.optimizer.step()
        return early

    # With these choices a rank that has the turn keeps it, and background work is done whenever the turn changes.
    results, _ = on_ranks(ranks, program, SIZES, 16, choices=[0], **ONE_EACH)
    assert all(results)


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_sent_before_it_is_known_that_all_do_the_same(ranks):
    def program(worker: Worker) -> list[str]:
        if worker.transport.rank == 1:
            worker.barrier("the others have run backward")
            worker.backward(worker.noise(0))
        else:
            worker.backward(worker.noise(0))
            worker.barrier("the others have run backward")
        worker.optimizer.step()

    _, world = on_ranks(ranks, program, SIZES, 4, **ONE_EACH)
    first_of_rank_1 = next(i for i, sent in enumerate(world.sent) if sent.rank == 1 and "handshake" in sent.name)
    before = {sent.kind for sent in world.sent[:first_of_rank_1]}
    assert before == {"sum"}, "an exchange has begun without rank 1"


def test_a_rank_sends_all_that_others_wait_for_before_it_waits_itself():
    """It reduces its shards of all buckets, and only then waits for those of the others."""
    _, world = on_ranks(3, lambda worker: worker.step(worker.noise(0)), SIZES, 4, **ONE_EACH)
    senders = [sent.rank for sent in world.sent if sent.name.endswith(".gather")]
    assert len(senders) == 3 * len(SIZES)
    assert sorted(senders, key=senders.index) == senders, "a rank has waited between two of its messages"


def test_an_error_in_backward_waits_for_the_step(monkeypatch):
    """Raised in a hook, it would reach the ranks at different points."""

    def out_of_memory(*arguments, **keywords):
        raise MemoryError("no room")

    def program(worker: Worker) -> str:
        monkeypatch.setattr("hvd_dyncomp.kernels.decode_into", out_of_memory)
        worker.backward(worker.noise(0))
        worker.barrier("all have run backward")
        for turn in range(3):
            worker.barrier(str(turn))
        with pytest.raises(MemoryError, match="no room"):
            worker.optimizer.step()
        return "raised"

    results, _ = on_ranks(2, program, SIZES, 4, choices=[0], **ONE_EACH)
    assert results == ["raised"] * 2


def test_work_in_the_background_ends_with_the_step():
    def program(worker: Worker) -> Worker:
        worker.step(worker.noise(0))
        worker.backward(worker.noise(1))
        worker.quantizer.load_state_dict(worker.quantizer.state_dict())  # gives up the step in flight
        worker.transport.wait(worker.transport.sum(torch.ones(1), "barrier"))
        return worker

    workers, world = on_ranks(2, program, SIZES, 4)
    # Horovod's optimizer still has the step that was given up.
    assert all(work() for works in world._background for work in works), "something goes on after the end"
    assert all(worker.optimizer._handles for worker in workers)


def test_a_step_that_nobody_has_any_more_is_over_in_the_background():
    def program(worker: Worker) -> None:
        worker.backward(worker.noise(0))

    _, world = on_ranks(2, program, SIZES, 4)
    gc.collect()
    works = [work for each in world._background for work in each]
    assert works and all(work() for work in works)
