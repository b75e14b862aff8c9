"""Values on hosts of several workers: within hosts, between hosts, within hosts."""

import gc
import weakref

import pytest
import torch
from simulated import (
    BY_HOST,
    WORLDS,
    Worker,
    mean_of,
    noise,
    on_ranks,
    places,
)

from hvd_dyncomp.exchange.messages import Messages
from hvd_dyncomp.simulate import InProcessTransport

SIZES = {"a": 130, "b": 500, "small": 5}


@WORLDS
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("bits", [1, 4, 16])
def test_what_is_not_finite_spoils_its_block_on_every_rank_and_no_other(ranks, hosts, bits, value):
    """In each section, and nothing of it is owed afterwards."""
    size = 64 * 9 + 7

    def program(worker: Worker):
        worker.step({"a": noise("a", size, worker.transport.rank, 0)})
        gradient = noise("a", size, worker.transport.rank, 1)
        if worker.transport.rank == ranks - 1:
            gradient[64 * 2 + 5] = value
            gradient[64 * 9 + 3] = value
        got = worker.step({"a": gradient})["a"]
        return got, worker.step({"a": noise("a", size, worker.transport.rank, 2)})["a"]

    results, _ = on_ranks(ranks, program, {"a": size}, bits, hosts=hosts)
    for got, after in results:
        assert [block.isnan().all().item() for block in got.split(64)] == [i in (2, 9) for i in range(10)]
        assert torch.equal(got.nan_to_num(), results[0][0].nan_to_num())
        assert all(block.isfinite().all() for i, block in enumerate(got.split(64)) if i not in (2, 9))
        assert after.isfinite().all() and torch.equal(after, results[0][1])


def held() -> int:
    """Bytes of all tensors."""
    storages = [one.untyped_storage() for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@BY_HOST
def test_a_rank_that_waits_for_its_neighbours_holds_only_what_it_sends(ranks, hosts):
    """A model's worth of memory otherwise, on the rank that is first."""
    values = 64 * 400

    def program(worker: Worker) -> int:
        worker.step(worker.noise(0))
        worker.barrier("a step")
        before = held() if worker.transport.rank == 0 else 0
        if worker.transport.rank == 0:
            worker.backward(worker.noise(1))
        grown = held() - before
        worker.barrier("rank 0 has run backward")
        if worker.transport.rank != 0:
            worker.backward(worker.noise(1))
        worker.optimizer.step()
        return grown

    [grown, *_], _ = on_ranks(ranks, program, {"a": values}, 4, hosts=hosts)
    assert values <= grown <= 1.1 * values, "half of the values as bfloat16"


@BY_HOST
def test_gradients_that_have_a_graph_of_their_own(ranks, hosts):
    """As `backward(create_graph=True)` makes them."""

    def program(worker: Worker, graph: bool) -> torch.Tensor:
        with torch.enable_grad():
            worker.backward({name: one.requires_grad_(graph) * 1 for name, one in worker.noise(0).items()})
            for turn in range(6):  # what has come goes on in the background
                worker.barrier(str(turn))
        worker.optimizer.step()
        return worker.parameters["b"].detach().clone()

    with_graph, _ = on_ranks(ranks, lambda worker: program(worker, True), SIZES, 4, choices=[0], hosts=hosts)
    without, _ = on_ranks(ranks, lambda worker: program(worker, False), SIZES, 4, choices=[0], hosts=hosts)
    assert all(torch.equal(a, b) for a, b in zip(with_graph, without, strict=True))


@places("2x2", "2x2 dealt", "3x2", "2x3 dealt")
@pytest.mark.parametrize("size", [10, 64, 65, 130])
def test_buckets_of_fewer_blocks_than_workers(ranks, hosts, size):
    """Some sections, or shards, are empty."""

    def program(worker: Worker):
        return [worker.step(worker.noise(step)) for step in range(3)][-1]["a"]

    for bits in (1, 16):
        results, _ = on_ranks(ranks, program, {"a": size}, bits, hosts=hosts)
        assert all(torch.equal(got, results[0]) for got in results)
    expected = mean_of("a", size, 2, range(ranks), ranks)
    assert (results[0] - expected).norm() <= 2e-3 * expected.norm()


@WORLDS
def test_messages_and_sums_are_let_go_before_the_step_ends(ranks, hosts, monkeypatch):
    """Of many buckets, those that are over hold nothing: a model's worth of memory otherwise."""
    kept, made = [], []  # messages of buckets, and all that has been received or encoded
    real_init, real_room, real_wait = Messages.__init__, Messages.allocate, InProcessTransport.wait

    def init(self, *arguments):
        kept.append(self)
        real_init(self, *arguments)

    def room(*arguments):
        result = real_room(*arguments)
        made.append(weakref.ref(result[0]))
        return result

    def wait(*arguments):
        received = real_wait(*arguments)
        made.append(weakref.ref(received))
        return received

    monkeypatch.setattr(Messages, "__init__", init)
    monkeypatch.setattr(Messages, "allocate", room)
    monkeypatch.setattr(InProcessTransport, "wait", wait)
    gc.collect()
    gc.disable()
    try:
        on_ranks(ranks, lambda worker: worker.step(worker.noise(0)) and None, SIZES, 4, hosts=hosts)
        assert len(kept) == ranks and len(made) > ranks
        assert not any(ref() is not None for ref in made)
    finally:
        gc.enable()
