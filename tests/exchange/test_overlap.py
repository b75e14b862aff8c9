"""Gradients travel while backward goes on: what has come is sent, reduced and delivered before anybody waits for it."""

import pytest
import torch
from simulated import WORLDS, Worker, by_host, mean_of, noise, on_ranks, phases, places

from hvd_dyncomp.exchange import recipes

ORDER = "hgfedcba"  # in which gradients come
SIZES = {name: 130 for name in reversed(ORDER)}
ONE_EACH = {"bucket_bytes": 1}  # a bucket for every parameter


def is_delivered(worker: Worker, name: str, step: int) -> bool:
    expected = mean_of(name, SIZES[name], step, range(worker.transport.size), worker.transport.size)
    return bool((worker.parameters[name].grad - expected).norm() <= 2e-3 * expected.norm())


@WORLDS
def test_calls_in_backward_do_all_that_is_possible(ranks, hosts):
    """The network is as fast as can be, and nothing happens in the background: the calls themselves carry it on."""

    def program(worker: Worker, step: int) -> list[list[str]]:
        seen = []
        worker.optimizer.zero_grad()
        for name in ORDER:
            gradient = noise(name, SIZES[name], worker.transport.rank, step)
            worker.optimizer.backward(worker.parameters[name], gradient)
            worker.barrier(f"{step}.{name}")  # until all have come as far
            done = [other for other in ORDER if worker.parameters[other].grad is not None]
            seen.append([other for other in done if is_delivered(worker, other, step)])
        worker.optimizer.step()
        assert all(is_delivered(worker, name, step) for name in SIZES)
        return seen

    results, _ = on_ranks(ranks, lambda worker: program(worker, 0), SIZES, 16, **ONE_EACH, hosts=hosts)
    # A gradient's message leaves with it, or with the next one where greetings are still under way. The next but one
    # finds that it has arrived; what takes more phases needs one more for each.
    late = 1 + len(phases(ranks, hosts))
    for seen in results:
        for i in range(late, len(ORDER)):
            assert set(ORDER[: i + 1 - late]) <= set(seen[i]), seen


@WORLDS
@pytest.mark.parametrize("attach", [False, True])
def test_messages_are_made_as_buckets_fill_once_it_is_known_where_the_ranks_are(ranks, hosts, attach, monkeypatch):
    """With `attach` from the first step on, without it from the second."""
    made: list[str] = []

    def seen(name):
        real = getattr(recipes, name)
        monkeypatch.setattr(recipes, name, lambda *arguments: made.append(name) or real(*arguments))

    if by_host(hosts):
        seen("values_for_neighbours")
    else:
        seen("encode_whole")
        seen("encode_shards")

    def program(worker: Worker) -> tuple[int, int]:
        worker.backward(worker.noise(0))
        first = len(made)
        worker.optimizer.step()
        assert all(is_delivered(worker, name, 0) for name in SIZES)
        worker.barrier("a step")
        before = len(made)
        worker.backward(worker.noise(1))
        after = len(made)
        worker.optimizer.step()
        assert all(is_delivered(worker, name, 1) for name in SIZES)
        return first, after - before

    results, _ = on_ranks(ranks, program, SIZES, 16, **ONE_EACH, hosts=hosts, attach=attach)
    assert all((first >= len(SIZES)) == attach for first, _ in results) and (attach or results[-1][0] == 0)
    assert all(later >= len(SIZES) for _, later in results)


@WORLDS
def test_what_has_come_goes_on_in_the_background(ranks, hosts):
    """After its last gradient a rank does something else; all has arrived when it asks."""

    def program(worker: Worker) -> bool:
        worker.backward(worker.noise(0))
        for turn in range(6):
            worker.barrier(str(turn))
        early = all(is_delivered(worker, name, 0) for name in SIZES)
        worker.optimizer.step()
        return early

    # With these choices a rank that has the turn keeps it, and background work is done whenever the turn changes.
    results, _ = on_ranks(ranks, program, SIZES, 16, choices=[0], **ONE_EACH, hosts=hosts)
    assert all(results)


@WORLDS
def test_nothing_is_sent_before_it_is_known_that_all_do_the_same(ranks, hosts):
    def program(worker: Worker) -> list[str]:
        if worker.transport.rank == 1:
            worker.barrier("the others have run backward")
            worker.backward(worker.noise(0))
        else:
            worker.backward(worker.noise(0))
            worker.barrier("the others have run backward")
        worker.optimizer.step()

    _, world = on_ranks(ranks, program, SIZES, 4, **ONE_EACH, hosts=hosts)
    first, first_of_rank_1 = (
        next(i for i, sent in enumerate(world.sent) if sent.rank in ranks_ and "handshake" in sent.name)
        for ranks_ in (range(ranks), [1])
    )
    before = {sent.kind for sent in world.sent[first:first_of_rank_1]}
    assert before == {"sum"}, "an exchange has begun without rank 1"


@places("3", "2x2", "3x2", "2x3 dealt")
def test_a_rank_sends_all_that_others_wait_for_before_it_waits_itself(ranks, hosts):
    """It ends its part in reducing all buckets, and only then waits for what others have made of theirs."""
    last = phases(ranks, hosts)[-1]
    _, world = on_ranks(ranks, lambda worker: worker.step(worker.noise(0)), SIZES, 4, **ONE_EACH, hosts=hosts)
    for rank in range(ranks):
        sent = [i for i, sent in enumerate(world.sent) if sent.rank == rank and sent.name.endswith(f".{last}")]
        waited = [before for who, name, before in world.waits if who == rank and name.endswith(f".{last}")]
        assert len(sent) == len(SIZES)
        assert all(max(sent) < before for before in waited), "a rank has waited between two of its messages"
    assert any(name.endswith(f".{last}") for _, name, _ in world.waits)


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
        worker.quantizer._fail(MemoryError())  # leaves the step in flight
        worker.transport.wait(worker.transport.sum(torch.ones(1), "barrier"))
        return worker

    workers, world = on_ranks(2, program, SIZES, 4)
    # Horovod's optimizer still has the step that was given up.
    assert all(work() for works in world._background for work in works), "something goes on after the end"
    assert all(worker.optimizer._handles for worker in workers)
