"""Whatever one rank does wrong, every rank gets the same error, soon."""

import re
import time

import horovod.torch as hvd
import pytest
import torch
from problem import Problem

from hvd_dyncomp import (
    AllRanks,
    Controller,
    DynamicQuantizer,
    LockstepError,
    Static,
    StepFunction,
)
from hvd_dyncomp.exchange import plan
from hvd_dyncomp.exchange.wire import WIRE_VERSION

pytestmark = pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")


def test_an_epoch_that_only_one_rank_has_seen(rank):
    controller, fresh = Controller(Static(4)), Controller(Static(4))
    controller.step({}, epoch=4)
    with pytest.raises(LockstepError, match="rank 1 has history 0"):
        (fresh if rank == 1 else controller).step({}, epoch=3)


def test_another_configuration_on_one_rank(rank):
    controller = Controller(Static(8 if rank == 1 else 4))
    with pytest.raises(LockstepError, match="rank 0 has bits 4, rank 1 has 8"):
        controller.step({})
    controller = Controller(StepFunction((2, 4), (0.6 if rank == 1 else 0.5,)))
    with pytest.raises(LockstepError, match=r"rank 0 has thresholds \[0.5\], rank 1 has \[0.6\]"):
        controller.step({"val_accuracy": 0.1, "train_loss": 1.0})


def test_another_history_on_one_rank(rank):
    """The same level all the same: it is the next one that would differ."""
    controller = Controller(Static(4))
    controller.step({"loss": 1.0})
    if rank == 1:
        state = controller.state_dict()
        state["history"][0]["metrics"]["loss"] = 2.0
        controller.load_state_dict(state)
    with pytest.raises(LockstepError, match="rank 0 has history"):
        controller.step({"loss": 1.0})


def test_replicas_that_have_parted(rank, size, request):
    """In the middle of a run. On request, nothing is left over from the comparison; found in a step, it is final."""
    controller = Controller(Static(4))
    problem = Problem(prefix=request.node.name, compression=DynamicQuantizer(controller))
    for step in range(3):
        problem.reduce(problem.draw(seed=step))
        problem.step()
        controller.step({})
    text = f"parameter {request.node.name}odd is not the same on rank 0 and rank {size - 1}; 1 of 6"
    before = problem.parameters["odd"].detach().clone()
    problem.parameters["odd"].data[-1] += rank == size - 1
    with pytest.raises(LockstepError, match=re.escape(text)):
        problem.optimizer._compression.check_replicas()
    controller.check_replicas = False
    controller.step({})
    problem.reduce(problem.draw(seed=5))
    controller.check_replicas = rank != 1
    with pytest.raises(LockstepError, match="rank 0 has check_replicas True, rank 1 has False"):
        controller.step({})
    controller.check_replicas = True
    problem.parameters["odd"].data.copy_(before)
    controller.step({})
    problem.reduce(problem.draw(seed=6))
    problem.parameters["odd"].data[-1] += rank == size - 1
    problem.reduce(problem.draw(seed=7))
    controller.step({})
    with pytest.raises(LockstepError, match=re.escape(text)):
        problem.reduce(problem.draw(seed=8))


def test_replicas_in_a_process_set(rank, size, request):
    """Of the first and the last rank. The others train nothing."""
    if size == 2:
        pytest.skip("the set would be of all ranks")
    some, controller = hvd.add_process_set([0, size - 1]), Controller(Static(4))
    if some.included():
        quantizer = DynamicQuantizer(controller)
        problem = Problem(prefix=request.node.name, names=["long"], compression=quantizer, process_set=some)
        problem.reduce(problem.draw(seed=1))
        quantizer.check_replicas()
        state, mine = AllRanks(quantizer).state_dict(), quantizer.state_dict()["residuals"]
        for _ in range(2):  # the second time nothing but the optimizer says of which ranks it is
            AllRanks(quantizer).load_state_dict(state)
            quantizer.check_replicas()
            assert len(AllRanks(quantizer).state_dict()["ranks"]) == 2
            assert all(torch.equal(mine[name], one) for name, one in quantizer.state_dict()["residuals"].items())
        problem.parameters["long"].data += rank
        with pytest.raises(LockstepError, match="parameter .*long is not the same on rank 0 and rank 1; 1 of 1"):
            quantizer.check_replicas()
    controller.step({})
    if some.included():
        with pytest.raises(LockstepError, match="parameter .*long is not the same on rank 0 and rank 1; 1 of 1"):
            problem.reduce(problem.draw(seed=2))
    hvd.remove_process_set(some)


def disagreeing(request, **arguments):
    # Names of its own: what the failed step has left in flight may still be on its way in the next test.
    problem = Problem(names=["bias", "long", "odd"], prefix=request.node.name, **arguments)
    with pytest.raises(LockstepError) as caught:
        problem.reduce(problem.draw(seed=1))
    return str(caught.value)


def test_another_level_on_one_rank(rank, request):
    text = disagreeing(request, compression=DynamicQuantizer(Controller(Static(8 if rank == 1 else 4))))
    assert "rank 0 has bits 4, rank 1 has 8" in text


def test_another_model_on_one_rank(rank, request):
    problem = Problem(
        prefix=request.node.name,
        names=["bias", "long", "odd"] if rank != 1 else ["bias", "matrix"],
        attach=False,
        compression=DynamicQuantizer(Controller(Static(4))),
    )
    with pytest.raises(LockstepError, match=r"parameter \S+long is float32 \(5000,\) on rank 0, not there on rank 1"):
        problem.reduce(problem.draw(seed=1))


def test_another_wire_format_on_one_rank(rank, request, monkeypatch):
    if rank == 1:
        monkeypatch.setattr(plan, "WIRE_VERSION", 99)
    problem = Problem(prefix=request.node.name, names=["long"], compression=DynamicQuantizer(Controller(Static(4))))
    with pytest.raises(LockstepError, match=f"wire version {WIRE_VERSION}, rank 1 has 99"):
        problem.reduce(problem.draw(seed=1))


def test_one_rank_cannot_begin(rank, request):
    named = [("other", torch.nn.Parameter(torch.zeros(5)))] if rank == 1 else None
    problem = Problem(
        prefix=request.node.name,
        names=["long"],
        attach=False,
        compression=DynamicQuantizer(Controller(Static(4)), named_parameters=named),
    )
    expected = (ValueError, "must name every") if rank == 1 else (LockstepError, "rank 1 cannot .* must name every")
    with pytest.raises(expected[0], match=expected[1]):
        problem.reduce(problem.draw(seed=1))


def test_a_slow_rank_does_not_block_the_backward_pass_of_the_others(rank):
    problem = Problem(names=["long", "matrix"], compression=DynamicQuantizer(Controller(Static(4)), bucket_bytes=1))
    wanted = problem.draw(seed=1)
    problem.reduce(wanted)
    problem.optimizer.zero_grad()
    hvd.barrier()
    if rank == 0:
        time.sleep(3)
    began = time.perf_counter()
    torch.stack([(p * wanted[n]).sum() for n, p in problem.parameters.items()]).sum().backward()
    assert time.perf_counter() - began < 2, "backward waited for rank 0"
    problem.optimizer.synchronize()


def test_buckets_travel_while_others_are_still_to_come():
    """The mean is in the first gradient's memory before backward is over."""
    quantizer = DynamicQuantizer(Controller(Static(16)), bucket_bytes=1)
    problem = Problem(names=["conv", "odd", "matrix", "long", "large"], compression=quantizer)
    problem.reduce(problem.draw(seed=1))
    wanted, order = problem.draw(seed=2), []
    means = {name: hvd.allreduce(gradient, name=f"mean.{name}") for name, gradient in wanted.items()}

    def before(name):
        def hook(gradient):
            order.append(name)
            hvd.barrier()  # what has been sent until now has arrived

        return hook

    for name, parameter in problem.parameters.items():
        parameter.register_hook(before(name))
    problem.optimizer.zero_grad()
    torch.stack([(p * wanted[n]).sum() for n, p in problem.parameters.items()]).sum().backward()
    # One call finds the handshake agreed and sends; the next ones find what has come: the shard, then the mean.
    first = order[0]
    assert (problem.parameters[first].grad - means[first]).norm() <= 1e-3 * means[first].norm()
    problem.optimizer.synchronize()


def test_one_rank_is_uncompressed(rank):
    """Without the handshake, the rank at 4 bits would wait for ever for a scatter of the other."""
    q = DynamicQuantizer(Controller(Static(4)))
    # Small tensors at both ends: they agree in Horovod's eyes, and are the first to be handed back.
    problem = Problem(names=["bias", "long", "scalar"], prefix="mixture.", compression=q)
    problem.reduce(problem.draw(seed=1))
    if rank == 1:
        q.controller.load_state_dict({**q.controller.state_dict(), "bits": 32})
    with pytest.raises((LockstepError, hvd.mpi_ops.HorovodInternalError)):
        problem.reduce(problem.draw(seed=2))
    assert torch.equal(hvd.allreduce(torch.ones(1), name="still alive"), torch.ones(1))
