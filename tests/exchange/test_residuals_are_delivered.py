"""What quantization loses is owed, and delivered: once, by the steps that follow, unless somebody drops it."""

import copy
import itertools

import pytest
import torch
from simulated import WORLDS, Worker, mean_of, noise, on_ranks

from hvd_dyncomp.errors import InFlight

SIZES = {"a": 130, "b": 500, "small": 5}
# To which sums over six steps are exact: a residual at 3 bits is below 0.5, so each rounding to bfloat16 is off by
# 0.0008 in standard deviations, for each rank's residual and for the shard's: 0.0023 in all. What is lost would be 0.3.
KEPT = 0.01


def mean(name: str, step: int, ranks: int) -> torch.Tensor:
    return mean_of(name, SIZES[name], step, range(ranks), ranks)


def exact(worker: Worker, step: int) -> dict[str, torch.Tensor]:
    """Gradients that lose nothing as bfloat16, within a host: what is lost there is not owed."""
    return {name: gradient.bfloat16().float() for name, gradient in worker.noise(step).items()}


def mean_of_exact(name: str, step: int, users: list[int], ranks: int) -> torch.Tensor:
    return sum(noise(name, SIZES[name], rank, step).bfloat16().float() for rank in users) / ranks


def error_of_sum(ranks: int, bits: int, steps: int, **arguments) -> float:
    """Relative error of all that was delivered by some steps."""

    def program(worker: Worker) -> torch.Tensor:
        total = torch.zeros(630)
        for step in range(steps):
            got = worker.step(worker.noise(step))
            total += torch.cat([got["a"], got["b"]])
        return total

    [total, *_], _ = on_ranks(ranks, program, SIZES, bits, **arguments)
    expected = sum(torch.cat([mean(name, step, ranks) for name in ("a", "b")]) for step in range(steps))
    return ((total - expected).norm() / expected.norm()).item()


@WORLDS
def test_the_error_of_a_sum_does_not_grow(ranks, hosts):
    """At 3 bits one step is wrong by a third; docs/math.md has what is left of that after thirty."""
    assert error_of_sum(ranks, 3, 30, hosts=hosts) < 0.09
    assert error_of_sum(ranks, 3, 30, hosts=hosts) < 0.3 * error_of_sum(ranks, 3, 30, hosts=hosts, error_feedback=False)


@WORLDS
def test_a_step_at_32_bits_delivers_all_that_is_owed_and_leaves_nothing(ranks, hosts):
    def program(worker: Worker):
        total = {name: torch.zeros(size) for name, size in SIZES.items()}
        carries = []
        for step in range(6):
            if step == 3:
                worker.set_level(32)
            for name, got in worker.step(exact(worker, step)).items():
                total[name] += got
            shards = worker.quantizer.state_dict()["shard_residuals"].values()
            carries.append(all(shard["carries"] for shard in shards) if step < 3 else any(s["carries"] for s in shards))
            addresses = {name: p.grad.data_ptr() for name, p in worker.parameters.items()}
        return total, carries, addresses

    results, world = on_ranks(ranks, program, SIZES, 3, hosts=hosts)
    for rank, (total, carries, addresses) in enumerate(results):
        for name in SIZES:
            expected = sum(mean_of_exact(name, step, range(ranks), ranks) for step in range(6))
            torch.testing.assert_close(total[name], expected, rtol=1e-4, atol=KEPT)
        assert carries == [True] * 3 + [False] * 3
        # Nothing is owed any more: gradients are reduced where they lie, without a copy.
        last = {sent.name: sent.address for sent in world.sent if sent.rank == rank and "allreduce" in sent.name}
        assert {name: last[f"allreduce.{name}"] for name in SIZES} == addresses


@WORLDS
def test_a_rank_without_gradients_at_32_bits_delivers_what_it_owes_later(ranks, hosts):
    """An empty batch in the first step at 32 bits; with nothing to add to, its residuals wait for the next."""

    def program(worker: Worker) -> torch.Tensor:
        total = torch.zeros(500)
        for step in range(6):
            if step == 3:
                worker.set_level(32)
            empty = step == 3 and worker.transport.rank == 1
            total += worker.step({} if empty else exact(worker, step))["b"]
        return total

    results, _ = on_ranks(ranks, program, SIZES, 3, hosts=hosts)
    expected = sum(mean_of_exact("b", step, range(ranks), ranks) for step in range(6) if step != 3)
    expected += mean_of_exact("b", 3, [rank for rank in range(ranks) if rank != 1], ranks)
    for total in results:
        torch.testing.assert_close(total, expected, rtol=1e-4, atol=KEPT)


@pytest.mark.promise("A parameter that no rank uses keeps its residual.")
@WORLDS
@pytest.mark.parametrize("bits", [0.25, 1, 2, 4, 16])
def test_a_parameter_that_no_rank_uses_keeps_what_it_is_owed(ranks, hosts, bits):
    """Also in blocks that it shares with others; one that some rank has used gets a mean, as ever."""

    def program(worker: Worker):
        first = worker.transport.rank == 0
        for step in range(2):
            worker.step(worker.noise(step))
        for step, left in enumerate([{"a"}, {"b"}, {"a", "small"}, {"small"}], 2):
            before = by_parameter(worker.quantizer.state_dict())
            used = SIZES.keys() - left - (set() if first else {"a"})
            got = worker.step({name: value for name, value in worker.noise(step).items() if name in used})
            after = by_parameter(worker.quantizer.state_dict())
            for name in left:
                assert not got[name].any() and torch.equal(after[name], before[name]), (step, name)
            assert all(got[name].any() for name in SIZES.keys() - left)
        return got

    results, _ = on_ranks(ranks, program, SIZES, bits, hosts=hosts)
    assert all(torch.equal(got[name], results[0][name]) for got in results for name in SIZES)


def by_parameter(state: dict) -> dict[str, torch.Tensor]:
    """Both residuals of each parameter: (2, values)."""
    found = {}
    for shard in state["shard_residuals"].values():
        shards = torch.zeros(1000)
        shards[shard["first"] : shard["first"] + len(shard["values"])] += shard["values"]
        for name, place in shard["slots"].items():
            found[name] = shards[place["start"] :][: SIZES[name]]
    return {
        name: torch.stack([own.float(), found.get(name, torch.zeros(SIZES[name]))])
        for name, own in state["residuals"].items()
    }


@WORLDS
def test_residuals_that_are_dropped_never_arrive(ranks, hosts):
    def program(worker: Worker, drop: bool, first: int):
        for step in range(first, 3):
            worker.step(worker.noise(step))
        if drop:
            worker.quantizer.drop_residuals()
        return worker.step(worker.noise(3))

    dropped, _ = on_ranks(ranks, lambda worker: program(worker, True, 0), SIZES, 2, hosts=hosts)
    fresh, _ = on_ranks(ranks, lambda worker: program(worker, False, 3), SIZES, 2, hosts=hosts)
    owed, _ = on_ranks(ranks, lambda worker: program(worker, False, 0), SIZES, 2, hosts=hosts)
    assert all(torch.equal(dropped[0][name], fresh[0][name]) for name in SIZES)
    assert not torch.equal(owed[0]["b"], fresh[0]["b"])


def all_residuals(worker: Worker) -> dict[str, torch.Tensor]:
    state = worker.quantizer.state_dict()
    shards = {f"shard {name}": shard["values"] for name, shard in state["shard_residuals"].items()}
    return {**state["residuals"], **shards}


def test_residuals_are_dropped_between_steps_only():
    def program(worker: Worker):
        worker.backward(worker.noise(0))
        with pytest.raises(RuntimeError, match="between steps, but gradients are in flight"):
            worker.quantizer.drop_residuals()
        worker.optimizer.step()
        worker.quantizer.drop_residuals()

    on_ranks(2, program, SIZES, 2)


@WORLDS
def test_a_state_that_is_loaded_in_mid_run_is_gone_back_to(ranks, hosts):
    """From there on everything is, bit for bit, as it was the first time."""

    def program(worker: Worker):
        for step in range(2):
            worker.step(worker.noise(step))
        state = worker.quantizer.state_dict()
        first = [worker.step(worker.noise(step)) for step in (2, 3)]
        worker.quantizer.load_state_dict(state)
        loaded = worker.quantizer.state_dict()
        assert loaded["steps"] == 2 and loaded["meter"] == state["meter"]
        for name, residual in state["residuals"].items():
            assert torch.equal(loaded["residuals"][name], residual)
        for bucket, shard in state["shard_residuals"].items():
            assert torch.equal(loaded["shard_residuals"][bucket]["values"], shard["values"])
        assert worker.quantizer.meter.total().steps == 2
        return first, [worker.step(worker.noise(step)) for step in (2, 3)]

    results, _ = on_ranks(ranks, program, SIZES, 2, hosts=hosts)
    for first, second in results:
        for step in range(2):
            assert all(torch.equal(first[step][name], second[step][name]) for name in SIZES)


def test_a_state_of_another_rank_is_refused_at_once_and_changes_nothing():
    def program(worker: Worker):
        worker.step(worker.noise(0))
        before = worker.quantizer.state_dict()
        worker.step(worker.noise(1))
        other = {**before, "rank": 1 - worker.transport.rank}
        for state in (other, {**other, "world_size": 3, "hosts": None}):
            with pytest.raises(ValueError, match=f"state was saved on rank {other['rank']}"):
                worker.quantizer.load_state_dict(state)
        after = worker.quantizer.state_dict()
        assert after["steps"] == 2 and after["meter"] != before["meter"]
        return worker.step(worker.noise(2))

    def undisturbed(worker: Worker):
        return [worker.step(worker.noise(step)) for step in range(3)][-1]

    refused, _ = on_ranks(2, program, SIZES, 2)
    expected, _ = on_ranks(2, undisturbed, SIZES, 2)
    assert all(torch.equal(refused[0][name], expected[0][name]) for name in SIZES)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("first", "then"),
    [({}, {"block_size": 128}), ({}, {"bucket_bytes": 600}), ({"bucket_bytes": 600}, {})],
    ids=["other blocks", "smaller buckets", "larger buckets"],
)
def test_residuals_of_other_buckets_are_still_owed(first, then, device):
    """A shard's is now its rank's own, whatever torch's default device."""

    def indebted(worker: Worker):
        worker.step(worker.noise(0))
        return worker.quantizer.state_dict()

    states, _ = on_ranks(3, indebted, SIZES, 2, **first)

    def program(worker: Worker):
        worker.quantizer.load_state_dict(copy.deepcopy(states[worker.transport.rank]))
        with torch.device(device):
            worker.quantizer.attach(worker.optimizer)
        loaded = worker.quantizer.state_dict()
        worker.step(worker.noise(1))
        return loaded

    loaded, _ = on_ranks(3, program, SIZES, 2, **then)
    before, after = ([by_parameter(state) for state in those] for those in (states, loaded))
    assert any(each["b"][1].any() for each in before) and any(each["a"][1].any() for each in before)
    for rank, name in itertools.product(range(3), SIZES):
        torch.testing.assert_close(after[rank][name].sum(0), before[rank][name].sum(0), rtol=2**-8, atol=2**-10)


@WORLDS
@pytest.mark.parametrize(("bits", "later"), [(2, 2), (32, 32), (2, 32), (32, 2)])
def test_a_second_synchronize_delivers_nothing_more(ranks, hosts, bits, later):
    """`synchronize`, clip, `step`: the clipped mean comes back, and residuals stay as they were."""

    def program(worker: Worker):
        worker.step(worker.noise(0))
        worker.set_level(bits)
        worker.backward(worker.noise(1))
        worker.optimizer.synchronize()
        for p in worker.parameters.values():
            p.grad.mul_(0.125)
        clipped = {name: p.grad.clone() for name, p in worker.parameters.items()}
        before = worker.quantizer.state_dict()
        worker.set_level(later)
        worker.optimizer.synchronize()  # as `step` does, unless within skip_synchronize
        worker.optimizer.step()
        after = worker.quantizer.state_dict()
        torch.testing.assert_close(owed(after), owed(before), rtol=2**-8, atol=0)  # rounded when it is put back
        for name, p in worker.parameters.items():
            torch.testing.assert_close(p.grad, clipped[name], rtol=1e-6, atol=1e-7)
        return worker.step(worker.noise(2))

    on_ranks(ranks, program, SIZES, 2, hosts=hosts)


def owed(state: dict) -> torch.Tensor:
    """By value of the only bucket, both residuals: of shards, it is this rank's part alone."""
    [(name, shard)] = state["shard_residuals"].items()
    total = torch.cat([state["residuals"][key] for key in ("b", "a", "small")] + [torch.zeros(5)])
    total[shard["first"] : shard["first"] + len(shard["values"])] += shard["values"]
    return total


def test_a_quantizer_that_works_for_another_model_does_not_owe_it_anything():
    """Wrapped, trained and thrown away; the next model has parameters of the same names and shapes."""
    import gc

    from simulated import SimulatedOptimizer, parameters

    def program(worker: Worker, before: int):
        for step in range(before):
            worker.step(worker.noise(step))
        worker.quantizer._levels.steps = 0
        del worker.optimizer
        gc.collect()
        worker.parameters = parameters(SIZES)
        worker.optimizer = SimulatedOptimizer(worker.parameters, worker.quantizer, worker.transport)
        return worker.step(worker.noise(5))

    second, _ = on_ranks(2, lambda worker: program(worker, 2), SIZES, 2)
    first, _ = on_ranks(2, lambda worker: program(worker, 0), SIZES, 2)
    assert all(torch.equal(second[0][name], first[0][name]) for name in SIZES)


@WORLDS
def test_a_state_loaded_between_backward_and_step_is_refused(ranks, hosts):
    """Nothing has changed then."""

    def program(worker, loads: bool):
        worker.step(worker.noise(0))
        saved = worker.quantizer.state_dict()
        worker.backward(worker.noise(1))
        if loads:
            with pytest.raises(InFlight, match="load_state_dict must be called between steps"):
                worker.quantizer.load_state_dict(saved)
        worker.optimizer.step()
        return {name: p.grad.clone() for name, p in worker.parameters.items()}

    sizes = {"a": 130, "b": 500}
    got, expected = (
        on_ranks(ranks, lambda worker, loads=loads: program(worker, loads), sizes, 4, hosts=hosts)[0]
        for loads in (True, False)
    )
    for mine, other in zip(got, expected, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in sizes)
