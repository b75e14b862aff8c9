"""Training loops in which the ranks do the same things in another order, or one does less: as stock Horovod has it.

As in test_optimizer_features.py, a loop runs with Horovod's own `Compression.none` and with ours. Buckets are
small, so that there are several. Nothing may hang: the time limit names the loop, and says where each rank was.
"""

from __future__ import annotations

import gc

import horovod.torch as hvd
import pytest
import torch
from problem import DEVICE, Linear, assert_close, distribute, level_of, ours, same_on_all_ranks, weights

LEVELS = (4, 32)  # compressed or not: the order is the same at every level that compresses
pytestmark = [
    pytest.mark.promise("Ranks may compute gradients in different orders, and some ranks fewer gradients."),
    pytest.mark.timeout(60, method="thread"),
]


def heads(compress, count=2):
    """Models of several shapes with an optimizer each, as for task heads or experts."""
    models = [Linear(sizes) for sizes in [(3000, 10, 2500), (2048, 1500), (4000, 1031, 7)][:count]]
    return models, [distribute(model, compress, prefix=f"head{i}.") for i, model in enumerate(models)]


def first_gradients_in_another_order(compress):
    models, optimizers = heads(compress)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Backward goes the other way, last loss first.
        turn = models[:: -1 if (hvd.rank() + step) % 2 else 1]
        sum(model(step) for model in turn).backward()
        for optimizer in optimizers:
            optimizer.step()
    return weights(*models)


def branches_of_one_model(compress):
    """One optimizer; ranks begin with parameters of other buckets."""
    model = Linear((3000, 2500, 2048, 1500, 10))
    optimizer = distribute(model, compress)
    for step in range(3):
        optimizer.zero_grad()
        model(step, (0, 2, 4) if (hvd.rank() + step) % 2 else (3, 1)).backward()
        optimizer.step()
    return weights(model)


def an_optimizer_of_some_ranks_only(compress):
    """Even ranks train an expert among themselves, beside a trunk that all share: they make a quantizer more."""
    even = hvd.add_process_set(list(range(0, hvd.size(), 2)))
    try:
        models, optimizers = [], []
        if hvd.rank() % 2 == 0:
            models.append(Linear((2048, 1500)))
            optimizers.append(distribute(models[0], compress, prefix="expert.", process_set=even))
        models.append(Linear())
        optimizers.append(distribute(models[-1], compress, prefix="trunk."))
        for step in range(3):
            for optimizer in optimizers:
                optimizer.zero_grad()
            sum(model(step) for model in models).backward()
            for optimizer in optimizers:
                optimizer.step()
        return weights(models[-1])
    finally:
        hvd.remove_process_set(even)


def empty_batches(compress, first, backward=True):
    """A loss that is averaged for the log between backward and step; a rank in turn has nothing to add to it."""
    model = Linear()
    optimizer = distribute(model, compress)
    for step in range(hvd.size() + 1):
        optimizer.zero_grad()
        empty = hvd.rank() == (first + step) % hvd.size()
        loss = torch.zeros((), device=DEVICE, requires_grad=True) if empty else model(step)
        if backward or not empty:
            loss.backward()
        hvd.allreduce(loss.detach(), name="loss")
        optimizer.step()
    return weights(model)


def empty_batch_on_rank_0_first(compress):
    return empty_batches(compress, 0)


def empty_batch_on_the_last_rank_first(compress):
    return empty_batches(compress, hvd.size() - 1, backward=False)


def empty_batches_with_two_optimizers(compress):
    """Who has no sample for a head meets the others in the average of its loss."""
    models, optimizers = heads(compress)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for i, model in enumerate(models):
            loss = torch.zeros((), device=DEVICE)
            if (hvd.rank() + step + i) % hvd.size():
                loss = model(step)
                loss.backward()
            hvd.allreduce(loss.detach(), name=f"loss{i}")
        for optimizer in optimizers:
            optimizer.step()
    return weights(*models)


def steps_in_another_order(compress, count=2):
    """Optimizers whose step() comes first on one rank and later on another.

    Every parameter has a gradient: stock Horovod hands over those without one in step() only, and would wait for ever.
    """
    models, optimizers = heads(compress, count)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(model(step) for model in models).backward()
        for turn in range(count):
            optimizers[(turn + hvd.rank() + step) % count].step()
    return weights(*models)


def steps_of_three_optimizers_in_another_order(compress):
    return steps_in_another_order(compress, 3)


def wrapped_again(compress):
    """A second optimizer over the same parameters, when the first one is gone (Horovod's hooks go with it)."""
    model, compression = Linear(), compress()
    for phase in range(2):
        optimizer = distribute(model, lambda: compression, lr=1 / (1 + phase))
        for step in range(2):
            optimizer.zero_grad()
            model(10 * phase + step).backward()
            optimizer.step()
        del optimizer
        gc.collect()
    return weights(model)


LOOPS = [
    first_gradients_in_another_order,
    branches_of_one_model,
    an_optimizer_of_some_ranks_only,
    empty_batch_on_rank_0_first,
    empty_batch_on_the_last_rank_first,
    empty_batches_with_two_optimizers,
    steps_in_another_order,
    steps_of_three_optimizers_in_another_order,
    wrapped_again,
]


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_as_without_compression(loop, bits):
    expected = loop(lambda: hvd.Compression.none)
    got = loop(ours(bits, bucket_bytes=8192))
    for mine, theirs in zip(got, expected, strict=True):
        assert_close(mine, theirs, level_of(mine, bits))
    assert same_on_all_ranks(got, f"{loop.__name__}.{bits}")


@pytest.mark.parametrize("bits", LEVELS)
def test_the_same_quantizer_for_two_optimizers_at_once(bits):
    """Both have hooks on the same parameters: refused, and not in the words of the third who stumbles over it."""
    model, compression = Linear(), ours(bits)()
    first = distribute(model, lambda: compression, prefix=f"at once {bits}.")
    model(1).backward()
    first.step()
    second = distribute(model, lambda: compression, prefix=f"at once {bits}.")
    with pytest.raises(ValueError, match="optimizer.*one DynamicQuantizer per optimizer"):
        model(2).backward()
        second.step()
    assert torch.equal(hvd.allreduce(torch.ones(1), name="still alive"), torch.ones(1))
