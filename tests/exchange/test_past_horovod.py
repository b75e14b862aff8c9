"""Gradients pass through Horovod in the first step without `attach`, and compressed ones never."""

import pytest
import torch
from simulated import WORLDS, RecordingWorld, Worker, mean_of, on_ranks

from hvd_dyncomp import DynamicQuantizer, LockstepError

SIZES = {"a": 640, "b": 130, "small": 5}


def reduced(world: RecordingWorld) -> list[str]:
    """What Horovod has reduced, by name, on rank 0."""
    return [sent.name for sent in world.sent if sent.rank == 0 and sent.name.startswith("allreduce.")]


@pytest.mark.promise("Features of Horovod's optimizer work with compression, within the level's error.")
@WORLDS
@pytest.mark.parametrize("attach", [False, True])
def test_the_first_step_is_horovods_unless_the_quantizer_is_attached(ranks, hosts, attach):
    def program(worker: Worker):
        return [worker.step(worker.noise(step)) for step in range(3)], worker.quantizer.meter.records

    results, world = on_ranks(ranks, program, SIZES, 4, hosts=hosts, attach=attach)
    assert sorted(reduced(world)) == ([] if attach else sorted(f"allreduce.{name}" for name in SIZES))
    for means, records in results:
        assert {bits: one.steps for (_, bits), one in records.items()} == ({4: 3} if attach else {32: 1, 4: 2})
        for step in range(3):
            assert all(torch.equal(means[step][name], results[0][0][step][name]) for name in SIZES)
            for name, size in SIZES.items():
                error = means[step][name] - mean_of(name, size, step, range(ranks), ranks)
                assert error.abs().max() <= (1e-6 if step == 0 and not attach else 1)


@WORLDS
def test_what_is_skipped_always_passes_through_horovod(ranks, hosts):
    def program(worker: Worker):
        for step in range(3):
            worker.step(worker.noise(step))

    _, world = on_ranks(ranks, program, SIZES, 4, hosts=hosts, skip=lambda name, parameter: name == "b")
    assert reduced(world) == ["allreduce.b"] * 3


@WORLDS
def test_a_loaded_state_waits_for_the_second_step(ranks, hosts):
    """Unless it is attached: then the run goes on as if it had not been interrupted."""

    def trained(worker: Worker):
        worker.step(worker.noise(0))
        return worker.quantizer.state_dict(), worker.step(worker.noise(1)), worker.quantizer.state_dict()

    before, _ = on_ranks(ranks, trained, SIZES, 2, hosts=hosts)

    def resumed(worker: Worker):
        worker.quantizer.load_state_dict(before[worker.transport.rank][0])
        means = worker.step(worker.noise(1))
        return means, worker.quantizer.state_dict()

    for attach in (False, True):
        after, _ = on_ranks(ranks, resumed, SIZES, 2, hosts=hosts, attach=attach)
        for (saved, expected, later), (means, state) in zip(before, after, strict=True):
            assert all(torch.equal(means[name], expected[name]) for name in SIZES) == attach
            untouched = later if attach else saved
            assert state["steps"] == 2 and saved["residuals"]["a"].any()
            assert all(torch.equal(state["residuals"][name], untouched["residuals"][name]) for name in SIZES)


@pytest.mark.promise("If ranks disagree, all of them raise an error that names the difference.")
@pytest.mark.parametrize("idle", [False, True])
@pytest.mark.parametrize("who", [0, 1])
@WORLDS
def test_a_rank_that_begins_anew_is_told_apart_on_all_ranks(ranks, hosts, who, idle):
    """Its quantizer is another one, and the others' are not; they may have no batch."""

    def program(worker: Worker) -> str:
        for step in range(2):
            worker.step(worker.noise(step))
        own = worker.transport.rank == who
        if own:
            state = worker.quantizer.state_dict()
            worker.quantizer = DynamicQuantizer(4, transport=worker.transport, block_size=64, min_numel=10)
            worker.quantizer.load_state_dict(state)
            worker.optimizer._compression = worker.quantizer
        with pytest.raises(LockstepError) as caught:
            worker.step({} if idle and not own else worker.noise(2))
        return str(caught.value)

    texts, _ = on_ranks(ranks, program, SIZES, 4, hosts=hosts)
    assert len(set(texts)) == 1
    assert f"rank 0 has attached {who != 0}, rank 1 has {who == 0} (has attach(optimizer) been called on" in texts[0]


@pytest.mark.parametrize("bits", [4, 32])
@WORLDS
def test_groups_are_refused_below_32_bits(ranks, hosts, bits):
    """On every rank, before anything is sent."""

    def program(worker: Worker) -> None:
        worker.optimizer._groups = 2
        if bits == 32:
            worker.step(worker.noise(0))
            return
        with pytest.raises(ValueError, match=r"^groups= of hvd\.DistributedOptimizer has no use below 32 bits"):
            worker.step(worker.noise(0))

    _, world = on_ranks(ranks, program, SIZES, bits, hosts=hosts, attach=False)
    assert bits == 32 or not reduced(world)


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
