"""What this package knows of Horovod's optimizer, and Horovod never promised: here it is seen whether it is so still.

If one of these fails after Horovod was changed, hvd_dyncomp/on_horovod/horovod_optimizer.py is the file to mend.
"""

import sys

import horovod.torch as hvd
import pytest
import torch

from hvd_dyncomp.on_horovod import horovod_optimizer

pytestmark = pytest.mark.promise("Changes in Horovod's optimizer or in FSDP2 are detected.")


class Spy(hvd.Compression.none):
    """A compressor that remembers what is seen from it."""

    def __init__(self):
        self.seen, self.handed_back = [], []

    def compress(self, tensor):
        self.seen.append((tensor, *horovod_optimizer.calling(self, sys._getframe(1))))
        return tensor, len(self.seen) - 1

    def decompress(self, tensor, ctx):
        self.handed_back.append(len(self.seen))
        return tensor


@pytest.fixture
def made(monkeypatch):
    """A spy, parameters and an optimizer that has hooks although there is one worker only, as in elastic training."""
    hvd.init()
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")

    def make(**arguments):
        spy, parameters = Spy(), [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
        parameters[1].requires_grad_(False)
        named = [(f"p{i}", p) for i, p in enumerate(parameters)]
        inner = torch.optim.SGD([parameters[2], parameters[1], parameters[0]], lr=1.0)
        return spy, parameters, hvd.DistributedOptimizer(inner, named_parameters=named, compression=spy, **arguments)

    return make


def test_attributes(made):
    spy, parameters, optimizer = made()
    assert horovod_optimizer.compressor_of(optimizer) is spy
    reduced = horovod_optimizer.reduced_parameters(optimizer)
    assert [id(p) for p in reduced] == [id(parameters[2]), id(parameters[0])], "those with hooks, in the groups' order"
    assert horovod_optimizer.names_of(optimizer)[parameters[0]] == "p0"
    assert horovod_optimizer.process_set_of(optimizer) is hvd.global_process_set
    assert horovod_optimizer.factor_of(optimizer, 4) == 0.25
    assert horovod_optimizer.factor_of(made(op=hvd.Sum)[2], 4) == 1
    assert horovod_optimizer.compressor_of(torch.optim.SGD(parameters, lr=1.0)) is None


@pytest.mark.parametrize("arguments", [{}, {"groups": 1}])
def test_who_calls_with_what(made, arguments):
    spy, parameters, optimizer = made(**arguments)
    torch.stack([p.sum() for p in parameters]).sum().backward()
    optimizer.step()
    assert len(spy.seen) == 2
    for gradient, caller, parameter in spy.seen:
        assert caller is optimizer and gradient is parameter.grad and any(parameter is p for p in parameters)
    assert spy.handed_back == [2, 2], "all gradients are handed in before the first is asked back"


def test_a_sparse_gradient_that_is_made_dense_is_known_by_its_parameter(made):
    spy, _, _ = made()
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), compression=spy, sparse_as_dense=True
    )
    table(torch.tensor([1])).sum().backward()
    [(gradient, caller, parameter)] = spy.seen
    assert caller is optimizer and parameter is table.weight and gradient is not table.weight.grad


def test_the_countdown_tells_what_backward_has_made(made):
    _, parameters, optimizer = made(backward_passes_per_step=2)
    first = parameters[0]
    reduced_already = horovod_optimizer.reduced_already
    assert not reduced_already(optimizer)
    for _ in range(2):
        first.sum().backward()
        assert not reduced_already(optimizer)
    optimizer.synchronize()
    assert reduced_already(optimizer), "what was handed back was made by an earlier backward"
    first.sum().backward()
    assert not reduced_already(optimizer)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert not reduced_already(optimizer)


def test_whether_horovod_reduces_in_groups(made):
    assert not horovod_optimizer.grouped(made()[2])
    assert horovod_optimizer.grouped(made(groups=2)[2])


def test_an_action_before_gradients_are_waited_for(made):
    spy, parameters, optimizer = made()
    seen = []
    undo = horovod_optimizer.before_synchronize(optimizer, lambda: seen.append(len(spy.handed_back)))
    parameters[0].sum().backward()
    optimizer.step()
    assert seen == [0]
    parameters[0].sum().backward()
    optimizer.synchronize()
    assert seen == [0, 2]
    undo()
    optimizer.synchronize()
    assert seen == [0, 2] and "synchronize" not in vars(optimizer)


def test_a_gradient_that_horovod_does_not_reduce(made):
    """It is handed back all the same, with its context, when all are in."""
    spy, (first, _, last), optimizer = made()
    contexts = []
    spy.decompress = lambda tensor, ctx: contexts.append((tensor, ctx)) or (last.grad if tensor is None else tensor)
    undo = horovod_optimizer.before_reduction(
        optimizer, lambda parameter: (horovod_optimizer.nothing, "ours") if parameter is last else None
    )
    for _ in range(2):
        (first.sum() + 3 * last.sum()).backward()
        assert len(spy.seen) == 1, "the other gradient only"
        optimizer.step()
        assert (None, "ours") in contexts and torch.equal(last.grad, torch.full((3,), 3.0))
        optimizer.zero_grad()
        spy.seen.clear()
    undo()
    assert "_allreduce_grad_async" not in vars(optimizer)
    (first.sum() + last.sum()).backward()
    assert len(spy.seen) == 2


def test_the_gradient_that_horovod_would_hand_over(made):
    optimizer = made()[2]
    table = torch.nn.Embedding(5, 3, sparse=True)
    dense = hvd.DistributedOptimizer(torch.optim.SGD(table.parameters(), lr=1.0), sparse_as_dense=True)
    assert torch.equal(horovod_optimizer.gradient_of(table.weight), torch.zeros(5, 3)), "none came"
    table.weight.grad = None
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad.is_sparse
    assert torch.equal(horovod_optimizer.gradient_of(table.weight), table.weight.grad.to_dense())
    assert [horovod_optimizer.stays_sparse(each, table.weight) for each in (optimizer, dense)] == [True, False]


def test_the_users_class_steps_within_horovods_step(made):
    """When gradients are reduced. (And hooks are called twice.)"""
    spy, parameters, optimizer = made()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(len(spy.handed_back)))
    optimizer.register_step_post_hook(lambda *_: seen.append("over"))
    parameters[0].sum().backward()
    optimizer.step()
    assert seen == [0, 2, "over", "over"]
