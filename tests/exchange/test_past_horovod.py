"""Compressed gradients pass through Horovod in the first step only, and whenever another rank's do."""

import pytest
import torch
from simulated import WORLDS, RecordingWorld, Worker, on_ranks

from hvd_dyncomp import LockstepError

SIZES = {"a": 640, "b": 130, "small": 5}


def reduced(world: RecordingWorld) -> list[str]:
    """What Horovod has reduced, by name, on rank 0."""
    return [sent.name for sent in world.sent if sent.rank == 0 and sent.name.startswith("allreduce.")]


@pytest.mark.promise("Features of Horovod's optimizer work with compression, within the level's error.")
@WORLDS
def test_tickets_in_the_first_step_only(ranks, hosts):
    def program(worker: Worker):
        return [worker.step(worker.noise(step)) for step in range(3)]

    results, world = on_ranks(ranks, program, SIZES, 4, hosts=hosts)
    assert sorted(reduced(world)) == sorted(f"allreduce.{name}" for name in SIZES)
    for step in range(3):
        for name in SIZES:
            assert all(torch.equal(result[step][name], results[0][step][name]) for result in results)


@WORLDS
def test_what_is_skipped_always_passes_through_horovod(ranks, hosts):
    def program(worker: Worker):
        for step in range(3):
            worker.step(worker.noise(step))

    _, world = on_ranks(ranks, program, SIZES, 4, hosts=hosts, skip=lambda name, parameter: name == "b")
    assert reduced(world).count("allreduce.b") == 3 and reduced(world).count("allreduce.a") == 1


@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("who", [0, 1])
@WORLDS
def test_a_rank_that_begins_anew_is_not_waited_for(ranks, hosts, who, idle):
    """It has been attached once more, or has loaded its state, and the others have not; they may have no batch."""

    def program(worker: Worker, *, anew: bool):
        means = []
        for step in range(4):
            if anew and step == 2 and worker.transport.rank == who:
                worker.quantizer.attach(worker.optimizer)
            no_batch = idle and step == 2 and worker.transport.rank != who
            means.append(worker.step({} if no_batch else worker.noise(step)))
        return means

    anew, world = on_ranks(ranks, lambda worker: program(worker, anew=True), SIZES, 4, hosts=hosts)
    plain, _ = on_ranks(ranks, lambda worker: program(worker, anew=False), SIZES, 4, hosts=hosts)
    assert reduced(world).count("allreduce.a") == 2
    for mine, other in zip(anew, plain, strict=True):
        for step in range(4):
            assert all(torch.equal(mine[step][name], other[step][name]) for name in SIZES)


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize(("level", "sent"), [(8, 8), (32, 16)])
@WORLDS
def test_ranks_that_differ_in_a_later_step(ranks, hosts, level, sent, idle):
    def program(worker: Worker):
        states = []
        for step in range(2):
            worker.step(worker.noise(step))
            states.append(worker.quantizer.state_dict())
        if worker.transport.rank == 1:
            worker.controller.policy.bits = level
            worker.controller._bits = level
        with pytest.raises(LockstepError, match=f"rank 0 has bits 4, rank 1 has {sent}"):
            worker.step({} if idle and worker.transport.rank == 0 else worker.noise(2))
        with pytest.raises(RuntimeError, match="step 2 was interrupted by LockstepError"):
            worker.quantizer.load_state_dict(states[-1])

    on_ranks(ranks, program, SIZES, 4, hosts=hosts)


@pytest.mark.promise("If `optimizer.load_state_dict` abandons a step, the run ends.")
@WORLDS
def test_a_step_that_horovod_forgets_ends_the_run(ranks, hosts):
    def program(worker: Worker):
        worker.step(worker.noise(0))
        worker.backward(worker.noise(1))
        worker.optimizer.forget()
        for _ in range(2):
            with pytest.raises(RuntimeError, match="step 1 was interrupted by RuntimeError: Horovod has lost"):
                worker.backward(worker.noise(2))

    on_ranks(ranks, program, SIZES, 4, hosts=hosts)


@pytest.mark.promise("A large parameter that no rank uses keeps its residual.")
@WORLDS
def test_what_no_rank_uses_in_a_later_step_has_a_mean_of_zero_and_keeps_its_residual(ranks, hosts):
    def program(worker: Worker):
        worker.step(worker.noise(0))
        before = worker.quantizer.state_dict()["residuals"]["a"].clone()
        got = worker.step({name: value for name, value in worker.noise(1).items() if name != "a"})
        return got["a"], before, worker.quantizer.state_dict()["residuals"]["a"]

    results, _ = on_ranks(ranks, program, {**SIZES, "a": 1100}, 1, hosts=hosts)
    for mean, before, after in results:
        assert not mean.any() and before.any() and torch.equal(before, after)
