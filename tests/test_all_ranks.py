"""One state of all ranks: it goes on bit for bit on as many ranks; on more or fewer, residuals begin at zero."""

import io

import pytest
import torch
from simulated import noise, places

from hvd_dyncomp import AllRanks, Averager, Controller, Schedule
from hvd_dyncomp.simulate import World

SHAPES = {"matrix": (40, 33), "odd": (1031,), "small": (7,)}
ARGUMENTS = {"block_size": 64, "min_numel": 20, "bucket_bytes": 3000}
STEPS = 3


def averager(transport, levels, **arguments):
    parameters = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    controller = Controller(Schedule(levels), transport=transport)
    return Averager(parameters.items(), controller, transport=transport, **{**ARGUMENTS, **arguments})


def gradients(rank, step):
    return [noise(name, torch.Size(shape).numel(), rank, step).view(shape) for name, shape in SHAPES.items()]


def trained(each, rank, steps=range(STEPS)):
    for step in steps:
        tensors = gradients(rank, step)
        each.mean_(tensors)
    return tensors


def kept(state):
    """What a framework reads from its file again."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@places("2", "3", "2x2")
@pytest.mark.parametrize("bits", [0.25, 4])
def test_the_same_ranks_go_on_bit_for_bit(ranks, hosts, bits):
    def whole(transport):
        each = averager(transport, {0: bits, 1: 1})
        trained(each, transport.rank)
        each.controller.step({"loss": 1.0})
        state = AllRanks(each).state_dict()
        return state, trained(each, transport.rank, range(STEPS, 2 * STEPS)), each.state_dict()

    before = World(ranks, hosts=hosts).run(whole)
    file = kept(before[0][0])  # rank 0's
    assert all(torch.equal(*pair) for state, *_ in before for pair in zip(state["ranks"], file["ranks"], strict=True))

    def resumed(transport):
        each = averager(transport, {0: bits, 1: 1})
        AllRanks(each).load_state_dict(file)
        assert each.bits == 1 and each.controller.epoch == 1
        return trained(each, transport.rank, range(STEPS, 2 * STEPS)), each.state_dict()

    for (_, means, state), (again, state_again) in zip(before, World(ranks, hosts=hosts).run(resumed), strict=True):
        assert all(map(torch.equal, means, again))
        for name, residual in state["residuals"].items():
            assert torch.equal(residual, state_again["residuals"][name])


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1)])
def test_on_another_number_of_ranks_residuals_begin_at_zero(before, after, caplog):
    """With one warning. Steps and level go on."""
    [state, *_] = World(before).run(state_of)

    def go_on(transport):
        each = averager(transport, {0: 4})
        AllRanks(each).load_state_dict(state)
        own = each.state_dict()
        assert own["steps"] == STEPS
        assert not any(residual.any() for residual in own["residuals"].values())
        return trained(each, transport.rank)

    means = World(after).run(go_on)
    assert all(map(torch.equal, means[0], means[-1]))
    assert caplog.text.count("residuals begin at zero") == 1


def state_of(transport, **arguments):
    each = averager(transport, {0: 4}, **arguments)
    trained(each, transport.rank)
    return AllRanks(each).state_dict()


def test_a_rank_without_a_state_is_an_error_on_all():
    def program(transport):
        each = averager(transport, {0: 4})
        if transport.rank == 1:
            each._step = object()  # as between backward and step
        with pytest.raises(
            RuntimeError, match="rank 1 has no state: .*in flight" if transport.rank != 1 else "in flight"
        ):
            AllRanks(each).state_dict()

    World(3).run(program)


def test_other_parameters_are_refused_and_nothing_changes():
    state = World(2).run(state_of)[0]

    def program(transport):
        each = Averager(
            [("matrix", torch.zeros(40, 30))], Controller(Schedule({0: 8}), transport=transport), **ARGUMENTS
        )
        with pytest.raises(ValueError, match="state has residuals of other parameters"):
            AllRanks(each).load_state_dict({**state, "controller": {**state["controller"], "bits": 4}})
        assert each.bits == 8 and each.controller.history == []

    World(2).run(program)


def test_without_error_feedback_there_is_nothing_to_take_over():
    def program(transport):
        each = averager(transport, {0: 4}, error_feedback=False)
        AllRanks(each).load_state_dict(state)
        trained(each, transport.rank)

    for arguments in ({}, {"error_feedback": False}):
        state = World(2).run(lambda transport: state_of(transport, **arguments))[0]  # noqa: B023  # runs at once
        World(3).run(program)
