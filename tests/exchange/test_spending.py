"""A budget of bits: tensors have levels of their own, the same on all ranks, and change them in the same step."""

import pytest
import torch
from simulated import SimulatedOptimizer, Worker, noise, on_ranks, parameters, places, set_level

from hvd_dyncomp import Controller, DynamicQuantizer, LockstepError, Static
from hvd_dyncomp.exchange import spending
from hvd_dyncomp.exchange.codec import HEADER_BYTES
from hvd_dyncomp.kernels import block_bytes
from hvd_dyncomp.transport.in_process import World

# In the order of buckets: "small" are two tensors of one unit. Energies differ by a factor of 100 from name to name.
SIZES = {"a": 640, "b": 1280, "c": 320, "s1": 5, "s2": 7}
STRENGTH = {"a": 0.1, "b": 1.0, "c": 10.0, "s1": 3.0, "s2": 3.0}
WORLDS = places("2", "3", "2x2")
FIRST = spending.FIRST


def gradients(worker: Worker, step: int, strength=STRENGTH) -> dict[str, torch.Tensor]:
    return {name: strength[name] * gradient for name, gradient in worker.noise(step).items()}


def run(ranks, hosts, program, bits=2, **arguments):
    arguments = {"allocation": "error", "min_numel": 100, **arguments}
    return on_ranks(ranks, program, SIZES, bits, hosts=hosts, **arguments)


@WORLDS
def test_levels_follow_energies_after_the_first_steps(ranks, hosts):
    def program(worker: Worker) -> list[dict]:
        levels = []
        for step in range(FIRST + 2):
            worker.step(gradients(worker, step))
            levels.append(worker.quantizer.levels())
        return levels

    results, world = run(ranks, hosts, program)
    assert all(levels == results[0] for levels in results)
    before, after = results[0][FIRST - 2], results[0][FIRST - 1]
    assert before == {"c": 2, "b": 2, "a": 2, "s2": 8}, (
        "the budget for all, and eight bits for the little that is small"
    )
    assert after == results[0][-1] and after["a"] < after["b"] < after["c"], after
    sizes = {"a": 640, "b": 1280, "c": 320, "s2": 64}  # whole blocks of 64
    assert sum(sizes[name] * bits for name, bits in after.items()) <= 2 * sum(sizes.values())
    assert len(world.messages(".energies")) == ranks, "energies are put together once"


@WORLDS
@pytest.mark.parametrize("bits", [3, 5])
def test_nothing_is_lost_while_levels_move(ranks, hosts, bits):
    """What was put in is what came out and what is owed; all ranks hold the same bits. (Levels above one bit: when one
    below is raised, its higher bound of residuals goes with it.)"""
    turned = {**STRENGTH, "a": 30.0}  # what shrinks would leave part of what it is owed to the bound

    def program(worker: Worker):
        put_in, out, seen = ({name: 0.0 for name in SIZES} for _ in range(3))
        levels = []
        for step in range(3 * FIRST):
            own = gradients(worker, step, {**STRENGTH, "a": 0.5} if step <= FIRST else turned)
            # bfloat16 can hold them: on their way within a host they are not rounded
            own = {name: gradient.bfloat16().float() for name, gradient in own.items()}
            reduced = worker.step(own)
            for name in SIZES:
                put_in[name] += own[name].double()
                out[name] += ranks * reduced[name].double()
                seen[name] = max(seen[name], float(own[name].abs().max()))
            levels.append(tuple(worker.quantizer.levels().values()))
            if step == 2 * FIRST:
                next_epoch(worker)
        state = worker.quantizer.state_dict()
        worker.barrier("end")
        return put_in, out, state, levels, seen

    results, _ = run(ranks, hosts, program, bits)
    assert len(set(results[0][3])) > 2, "levels have moved twice"
    assert all(result[3] == results[0][3] for result in results)
    for name, size in SIZES.items():
        owed = torch.zeros(size, dtype=torch.float64)
        for put_in, out, state, *_ in results:
            assert torch.equal(out[name], results[0][1][name])
            owed += put_in[name] + 0 - state["residuals"][name].double()
        shards = shard_owed(results, name, size)
        lost = owed - results[0][1][name] - shards
        scale = max(result[4][name] for result in results)
        assert lost.abs().max() <= 3e-4 * scale * ranks, name


def next_epoch(worker: Worker) -> None:
    """As `Controller.step` would: the epoch is one more."""
    from hvd_dyncomp import Record

    worker.controller.history.append(Record(worker.controller.epoch, {}, worker.controller.bits))


def shard_owed(results: list, name: str, size: int) -> torch.Tensor:
    """What shards' residuals hold for a parameter, where there are shards."""
    total = torch.zeros(size, dtype=torch.float64)
    starts = {"c": 0, "b": 320, "a": 1600, "s2": 2240, "s1": 2247}
    for _, _, state, *_ in results:
        for shard in state["shard_residuals"].values():
            whole = torch.zeros(4096, dtype=torch.float64)
            whole[shard["first"] : shard["first"] + shard["values"].numel()] = shard["values"].double()
            total += whole[starts[name] : starts[name] + size]
    return total


@WORLDS
def test_one_rank_in_a_new_epoch_is_enough(ranks, hosts):
    """And whoever asked, all learn in the same step."""

    def program(worker: Worker) -> list[dict]:
        levels = []
        for step in range(2 * FIRST):
            if step == FIRST + 2 and worker.transport.rank == ranks - 1:
                next_epoch(worker)
            strength = STRENGTH if step < FIRST else dict.fromkeys(SIZES, 1.0)
            worker.step(gradients(worker, step, strength))
            levels.append(worker.quantizer.levels())
        return levels

    results, world = run(ranks, hosts, program)
    assert all(levels == results[0] for levels in results)
    assert len(world.messages(".energies")) == 2 * ranks
    assert results[0][FIRST + 1] != results[0][FIRST + 2]


@places("2", "2x2")
def test_levels_stay_while_energies_move_little(ranks, hosts):
    def program(worker: Worker) -> list[dict]:
        levels = []
        for step in range(FIRST + 30):
            if step >= FIRST:
                next_epoch(worker)
            worker.step(gradients(worker, step))
            levels.append(worker.quantizer.levels())
        return levels

    results, world = run(ranks, hosts, program)
    assert len(world.messages(".energies")) > 3 * ranks
    assert all(levels == results[0][FIRST - 1] for levels in results[0][FIRST - 1 :])


@places("2", "2x2")
def test_levels_do_not_flap(ranks, hosts):
    """One of two tensors can be paid more; which has a little more energy changes from epoch to epoch."""

    def program(worker: Worker) -> list[dict]:
        levels = []
        for step in range(FIRST + 24):
            next_epoch(worker)
            norms = {"a": 1.03, "b": 1.0, "c": 4.5} if step < FIRST else {"a": 1.0, "b": 1.03, "c": 4.5}
            worker.step({name: norms[name] * own / own.norm() for name, own in worker.noise(0).items()})
            levels.append(worker.quantizer.levels())
        return levels

    sizes = {"a": 640, "b": 640, "c": 128}
    results, _ = on_ranks(ranks, program, sizes, 2, hosts=hosts, allocation="error", min_numel=100)
    settled = results[0][FIRST - 1]
    assert settled["a"] > settled["b"]
    assert all(levels == settled for levels in results[0][FIRST:])


@places("2", "3")
def test_another_budget_needs_no_new_energies(ranks, hosts):
    def program(worker: Worker) -> list[dict]:
        levels = []
        for step in range(FIRST + 4):
            set_level(worker.controller, {FIRST: 0.25, FIRST + 1: 32, FIRST + 2: 4}.get(step, worker.controller.bits))
            worker.step(gradients(worker, step))
            levels.append(worker.quantizer.levels())
        return levels

    results, world = run(ranks, hosts, program)
    one, quarter, none, four = results[0][FIRST - 1 : FIRST + 3]
    assert all(quarter[name] <= one[name] <= four[name] for name in one) and quarter != one != four
    assert set(none.values()) == {32}
    assert len(world.messages(".energies")) == ranks


@WORLDS
def test_a_resumed_run_goes_on_bit_by_bit(ranks, hosts):
    """Also through the next allocation, to which both halves have added, and right before it is made."""
    end = FIRST + 30

    def program(worker: Worker, resumed_at: int | None = None):
        means = []
        for step in range(end):
            if step == resumed_at:
                state = worker.quantizer.state_dict()
                worker = Worker(
                    worker.transport, SIZES, 1, allocation="error", min_numel=100, controller=worker.controller
                )
                worker.quantizer.load_state_dict(state)
            if step == end - 5:
                next_epoch(worker)
            means.append(worker.step(gradients(worker, step, STRENGTH if step < 9 else dict.fromkeys(SIZES, 1.0))))
        return means, worker.quantizer.levels()

    whole, _ = run(ranks, hosts, program)
    for at in (3, FIRST, FIRST + 15, end - 4):
        halves, _ = run(ranks, hosts, lambda worker, at=at: program(worker, at))
        for (expected, levels), (got, got_levels) in zip(whole, halves, strict=True):
            assert levels == got_levels
            for one, other in zip(expected, got, strict=True):
                assert all(torch.equal(one[name], other[name]) for name in SIZES)


@pytest.mark.parametrize("bits", [4, 32])
def test_two_optimizers_in_any_order(bits):
    """Who waits for one, and for its energies, keeps nobody from waiting for the other."""

    def program(transport) -> bool:
        models = [parameters({f"{model}.a": 700, f"{model}.b": 30}) for model in ("one", "two")]
        optimizers = []
        for named in models:
            quantizer = DynamicQuantizer(Controller(Static(4)), transport=transport, block_size=64, allocation="error")
            optimizers.append(SimulatedOptimizer(named, quantizer, transport))
        for step in range(FIRST + 2):
            for optimizer, named in zip(optimizers, models, strict=True):
                set_level(optimizer._compression.controller, bits if step == FIRST - 1 else 4)
                optimizer.zero_grad()
                for name, p in named.items():
                    optimizer.backward(p, noise(name, p.numel(), transport.rank, step))
            for optimizer in optimizers[:: -1 if transport.rank else 1]:
                optimizer.step()
        return all(optimizer._compression.state_dict()["spending"]["energies"] for optimizer in optimizers)

    assert World(2).run(program) == [True, True]


@WORLDS
@pytest.mark.parametrize("at", [0, 3, FIRST, FIRST + 3])
def test_a_worker_that_joins_has_the_same_levels(ranks, hosts, at):
    """As in elastic training: the last rank is a new process, and takes over what rank 0 knows."""

    def program(worker: Worker):
        for step in range(at):
            worker.step(gradients(worker, step))
        if worker.transport.rank == ranks - 1:
            worker = Worker(worker.transport, SIZES, 2, allocation="error", min_numel=100)
        worker.quantizer.sync()
        levels, means = [], []
        for step in range(at, FIRST + 10):
            means.append(worker.step(gradients(worker, step)))
            levels.append(worker.quantizer.levels())
        state = worker.quantizer.state_dict()["spending"]
        return levels, means, {key: value for key, value in state.items() if key != "sums"}

    results, _ = run(ranks, hosts, program)
    for levels, means, state in results:
        assert levels == results[0][0] and state == results[0][2]
        assert all(torch.equal(a[n], b[n]) for a, b in zip(means, results[0][1], strict=True) for n in SIZES)
    assert len({str(levels) for levels in results[0][0]}) == (1 if at >= FIRST else 2)


@places("2", "2x2")
def test_one_rank_may_ask_for_its_levels(ranks, hosts):
    """At any time, also at a budget that no step has had: what is asked changes nothing."""

    def program(worker: Worker) -> list[dict]:
        states = []
        for step in range(FIRST + 3):
            worker.step(gradients(worker, step))
            set_level(worker.controller, 4)
            if worker.transport.rank == 0:
                worker.quantizer.levels()
            set_level(worker.controller, 1)
            states.append({**worker.quantizer.state_dict()["spending"], "sums": None})
        return states

    results, _ = run(ranks, hosts, program)
    assert all(states == results[0] for states in results)


def test_other_levels_on_one_rank_are_said_before_anything_is_sent():
    def program(worker: Worker) -> str:
        for step in range(FIRST + 1):
            worker.step(gradients(worker, step))
        if worker.transport.rank == 1:
            plan = worker.quantizer._lifecycle.plan
            plan.spending._kept = {2: (2, 2, 2, 2)}
        with pytest.raises(LockstepError) as caught:
            worker.step(gradients(worker, FIRST + 1))
        return str(caught.value)

    results, _ = run(2, (), program)
    assert all("levels of tensors" in text and "rank 1 has [[2, 2, 2, 2]]" in text for text in results), results


def test_without_gradients_the_budget_stays():
    """Energies of zero, and of what is not finite, say nothing."""

    def program(worker: Worker) -> dict:
        for step in range(FIRST + 1):
            own = {name: torch.zeros_like(g) for name, g in worker.noise(step).items()}
            if step % 2:
                own["a"][3] = float("nan")
            worker.step(own)
        return worker.quantizer.levels()

    results, _ = run(2, (), program)
    assert all(levels == {"c": 2, "b": 2, "a": 2, "s2": 8} for levels in results)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_parameters_of_any_dtype(dtype):
    def program(worker: Worker) -> dict:
        worker.parameters = {name: torch.nn.Parameter(p.to(dtype)) for name, p in worker.parameters.items()}
        worker.optimizer = SimulatedOptimizer(worker.parameters, worker.quantizer, worker.transport)
        for step in range(FIRST):
            worker.step({name: gradient.to(dtype) for name, gradient in gradients(worker, step).items()})
        return worker.quantizer.levels()

    results, _ = run(2, (), program)
    assert all(levels["a"] < levels["b"] < levels["c"] for levels in results), results


@places("2", "3", "2x2")
def test_steps_of_a_scaler_that_overflow_say_nothing(ranks, hosts):
    """Scales are halved until nothing overflows any more; "c" does so first, on one rank."""

    def program(worker: Worker, steps_too_large: int) -> list[float]:
        for step in range(FIRST):
            own = {name: 2.0 ** (16 - step) * gradient for name, gradient in gradients(worker, 0).items()}
            if step < steps_too_large and worker.transport.rank == 1:
                own["c"][7] = float("inf")
            worker.step(own)
        energies = worker.quantizer.state_dict()["spending"]["energies"]
        return [energy / energies[0] for energy in energies]

    (expected, *_), _ = run(ranks, hosts, lambda worker: program(worker, 0))
    results, _ = run(ranks, hosts, lambda worker: program(worker, 4))
    for shares in results:
        assert shares == pytest.approx(expected, rel=1e-3)


def test_what_is_sent_is_what_the_levels_say():
    def program(worker: Worker) -> int:
        for step in range(FIRST + 1):
            worker.step(gradients(worker, step))
        return worker.quantizer.levels()

    results, world = run(2, (), program)
    levels = results[0]
    blocks = {"c": range(0, 5), "b": range(5, 25), "a": range(25, 35), "s2": range(35, 36)}  # 320, 1280, 640, 12 values
    expected = sum(block_bytes(levels[name], 64) * len(own) for name, own in blocks.items())
    assert {len(message) for message in world.messages(".pair")[-2:]} == {HEADER_BYTES + expected}


@pytest.mark.parametrize("block_size", [64, 256])
@pytest.mark.parametrize("bits", [0.5, 1, 4])
def test_the_budget_is_not_overspent_where_blocks_are_shared(bits, block_size):
    """Tensors that are not whole blocks, of any strength; what is small is beside the budget, and counts."""
    sizes = {f"t{number}": 520 + 37 * number for number in range(20)} | {"s": 9}

    def program(worker: Worker) -> None:
        for step in range(FIRST + 1):
            own = worker.noise(step)
            worker.step({name: 1.7 ** (number % 13) * own[name] for number, name in enumerate(own)})

    arguments = {"allocation": "error", "min_numel": 100, "block_size": block_size, "bucket_bytes": 2**30}
    _, world = on_ranks(2, program, sizes, bits, **arguments)
    blocks = -(-sum(sizes.values()) // block_size)
    scales = 4 * blocks
    [first, last] = [len(message) - HEADER_BYTES for message in world.messages(".pair", 0)][:: len(range(FIRST))][:2]
    assert last != first, "levels are allocated"
    assert 8 * (last - scales) <= bits * blocks * block_size
