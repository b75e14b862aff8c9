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


@pytest.mark.parametrize("bits", [3, 16])
@WORLDS
def test_the_first_step_after_a_rise_to_32_bits_delivers_all_that_is_owed(ranks, hosts, bits):
    """At 16 bits, as which it is counted. What it leaves is dropped; gradients then travel where they lie."""

    def program(worker: Worker):
        total = {name: torch.zeros(size) for name, size in SIZES.items()}
        owed, announced = [], []
        for step in range(6):
            if step == 3:
                worker.set_level(32)
            announced.append(worker.quantizer.bits)
            for name, got in worker.step(exact(worker, step)).items():
                total[name] += got
            owed.append(any(residual.any() for residual in all_residuals(worker).values()))
            addresses = {name: p.grad.data_ptr() for name, p in worker.parameters.items()}
        steps = {level: record.steps for (_, level), record in worker.quantizer.meter.records.items()}
        return total, owed, announced, addresses, (steps, worker.quantizer.meter.at(1, 16).sent_bytes > 0)

    results, world = on_ranks(ranks, program, SIZES, bits, hosts=hosts)
    for rank, (total, owed, announced, addresses, counted) in enumerate(results):
        for name in SIZES:
            expected = sum(mean_of_exact(name, step, range(ranks), ranks) for step in range(6))
            torch.testing.assert_close(total[name], expected, rtol=1e-4, atol=KEPT)
        assert owed == [True] * 3 + [False] * 3 and announced == [bits] * 3 + [16, 32, 32]
        assert counted == ({bits: 3, 16: 1, 32: 2} if bits != 16 else {16: 1, 32: 2}, True)
        last = {sent.name: sent.address for sent in world.sent if sent.rank == rank and "allreduce" in sent.name}
        assert {name: last[f"allreduce.{name}"] for name in SIZES} == addresses


@WORLDS
def test_a_run_that_resumes_at_a_rise_to_32_bits_repeats_it_bit_for_bit(ranks, hosts):
    def program(worker: Worker, saved=None):
        if saved is not None:
            worker.quantizer.attach(worker.optimizer)
            worker.quantizer.load_state_dict(saved[worker.transport.rank])
        else:
            for step in range(2):
                worker.step(worker.noise(step))
        state = copy.deepcopy(worker.quantizer.state_dict())
        worker.set_level(32)
        return state, [worker.step(worker.noise(step)) for step in (2, 3)], worker.quantizer.meter.at(1, 16).steps

    whole, _ = on_ranks(ranks, program, SIZES, 2, hosts=hosts)
    saved = [state for state, *_ in whole]
    resumed, _ = on_ranks(ranks, lambda worker: program(worker, saved), SIZES, 2, hosts=hosts)
    for (_, first, delivered), (_, second, again) in zip(whole, resumed, strict=True):
        assert all(torch.equal(first[step][name], second[step][name]) for step in range(2) for name in SIZES)
        assert delivered == again == 1


@WORLDS
def test_without_residuals_a_rise_to_32_bits_is_one_at_once(ranks, hosts):
    def program(worker: Worker):
        worker.step(worker.noise(0))
        worker.set_level(32)
        worker.step(worker.noise(1))
        return list(worker.quantizer.meter.records)

    results, _ = on_ranks(ranks, program, SIZES, 2, hosts=hosts, error_feedback=False)
    assert results == [[(0, 2), (1, 32)]] * ranks


LARGE = {"a": 1025, "b": 1500, "small": 5, "c": 2000, "other": 3}


@pytest.mark.promise("A large parameter that no rank uses keeps its residual.")
@WORLDS
@pytest.mark.parametrize("bits", [0.25, 1, 2, 4, 16])
def test_a_parameter_that_no_rank_uses_keeps_what_it_is_owed(ranks, hosts, bits):
    """It shares no block with others. One that some rank has used gets a mean, as ever."""

    def program(worker: Worker):
        first = worker.transport.rank == 0
        for step in range(2):
            worker.step(worker.noise(step))
        for step, left in enumerate([{"a"}, {"b"}, {"a", "c"}, {"small", "other"}], 2):
            before = by_parameter(worker.quantizer.state_dict(), LARGE)
            used = LARGE.keys() - left - (set() if first else {"b"})
            got = worker.step({name: value for name, value in worker.noise(step).items() if name in used})
            after = by_parameter(worker.quantizer.state_dict(), LARGE)
            for name in left:
                assert not got[name].any() and torch.equal(after[name], before[name]), (step, name)
            assert all(got[name].any() for name in LARGE.keys() - left)
            waited.update(name for name in left if before[name].any())
        return got

    waited: set[str] = set()
    results, _ = on_ranks(ranks, program, LARGE, bits, hosts=hosts)
    assert all(torch.equal(got[name], results[0][name]) for got in results for name in LARGE)
    assert {"a", "b", "c"} <= waited


@WORLDS
def test_padding_between_tensors_has_no_residual_and_counts_in_no_scale(ranks, hosts):
    """At 1 bit padding would get values, and residuals that no state has; and a scale is a mean of magnitudes."""

    def program(worker: Worker):
        means = []
        for _ in range(3):
            means.append(worker.step({name: torch.ones_like(p) for name, p in worker.parameters.items()}))
            [bucket] = worker.quantizer._plan.buckets
            real = torch.zeros(bucket.blocks * 64, dtype=torch.bool)
            for slot in bucket.slots:
                real[slot.range] = True
            residuals = bucket.residuals
            assert int(real.sum()) == sum(LARGE.values()) < len(real) - 2 * 63
            assert not residuals.own[~real[residuals.own_range]].any()
            assert not residuals.shard[~real[residuals.shard_range]].any()
        return means

    results, _ = on_ranks(ranks, program, LARGE, 1, hosts=hosts)
    for means in results:
        for mean in means:  # of ones: the scale of a block is right if nothing else is in it
            for name in ("a", "b", "c"):
                torch.testing.assert_close(mean[name], torch.ones(LARGE[name]), rtol=2**-7, atol=0)


@WORLDS
def test_a_run_with_padding_between_tensors_is_resumed_bit_for_bit(ranks, hosts):
    def program(worker: Worker, saved=None):
        if saved is not None:
            worker.quantizer.attach(worker.optimizer)
            worker.quantizer.load_state_dict(saved[worker.transport.rank])
        else:
            for step in range(2):
                worker.step(worker.noise(step))
        state = copy.deepcopy(worker.quantizer.state_dict())
        return state, [worker.step(worker.noise(step)) for step in (2, 3)]

    whole, _ = on_ranks(ranks, program, LARGE, 1, hosts=hosts)
    saved = [state for state, _ in whole]
    resumed, _ = on_ranks(ranks, lambda worker: program(worker, saved), LARGE, 1, hosts=hosts)
    for (_, first), (_, second) in zip(whole, resumed, strict=True):
        assert all(torch.equal(first[step][name], second[step][name]) for step in range(2) for name in LARGE)


def by_parameter(state: dict, sizes: dict[str, int] = SIZES) -> dict[str, torch.Tensor]:
    """Both residuals of each parameter: (2, values)."""
    found = {}
    for shard in state["shard_residuals"].values():
        shards = torch.zeros(10000)
        shards[shard["first"] : shard["first"] + len(shard["values"])] += shard["values"]
        for name, place in shard["slots"].items():
            found[name] = shards[place["start"] :][: sizes[name]]
    return {
        name: torch.stack([own.float(), found.get(name, torch.zeros(sizes[name]))])
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
    """Those of parameters, not those of shards; whatever torch's default device."""

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
    for rank, name in itertools.product(range(3), SIZES):
        assert before[rank][name][0].any() and torch.equal(after[rank][name][0], before[rank][name][0])


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
    b, a, small = (state["residuals"][key] for key in ("b", "a", "small"))
    total = torch.cat([b, a, torch.zeros(10), small, torch.zeros(59)])
    total[shard["first"] : shard["first"] + len(shard["values"])] += shard["values"]
    return total


def test_a_quantizer_that_works_for_another_model_does_not_owe_it_anything():
    """Wrapped, trained and thrown away; the next model has parameters of the same names and shapes."""
    import gc

    from simulated import SimulatedOptimizer, parameters

    def program(worker: Worker, before: int):
        for step in range(before):
            worker.step(worker.noise(step))
        worker.quantizer._steps = 0
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
