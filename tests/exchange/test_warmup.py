"""The first steps have at least the bits of the warm-up, on all ranks; a run that resumes in it ends it in time."""

import pytest
from simulated import WORLDS, Worker, on_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Static

SIZES = {"a": 300, "small": 5}


def level_of_a_step(worker: Worker, step: int) -> float:
    """Does a step, and looks up where its bytes were counted."""
    before = {key: traffic.steps for key, traffic in worker.quantizer.meter.records.items()}
    worker.step(worker.noise(step))
    [bits] = [key[1] for key, traffic in worker.quantizer.meter.records.items() if traffic.steps > before.get(key, 0)]
    return bits


@WORLDS
@pytest.mark.parametrize("warm", [32, 4])
def test_the_first_steps_have_more_bits_on_every_rank(ranks, hosts, warm):
    def program(worker: Worker) -> tuple[list[float], list[float]]:
        announced = [worker.quantizer.bits]
        levels = []
        for step in range(5):
            levels.append(level_of_a_step(worker, step))
            announced.append(worker.quantizer.bits)
        return levels, announced

    results, _ = on_ranks(ranks, program, SIZES, 2, hosts=hosts, warmup_steps=3, warmup_bits=warm)
    assert results == [([warm] * 3 + [2, 2], [warm] * 3 + [2, 2, 2])] * ranks


def test_a_controller_that_demands_more_gets_it():
    def program(worker: Worker) -> list[float]:
        levels = []
        for step in range(6):
            worker.set_level({1: 32, 2: 8, 3: 1}.get(step, 2))
            levels.append(level_of_a_step(worker, step))
        return levels

    results, _ = on_ranks(2, program, SIZES, 2, warmup_steps=5, warmup_bits=4)
    assert results == [[4, 16, 8, 4, 4, 2]] * 2, "a first step at 32 bits is sent at 16, with the residuals"


@pytest.mark.parametrize("at", [1, 3, 4])
def test_a_run_that_resumes_ends_its_warm_up_where_it_would_have_ended(at):
    def program(worker: Worker) -> list[float]:
        levels = [level_of_a_step(worker, step) for step in range(at)]
        state = worker.quantizer.state_dict()
        worker.barrier("saved")
        arguments = {"block_size": 64, "min_numel": 10, "warmup_steps": 3, "warmup_bits": 8}
        resumed = DynamicQuantizer(Controller(Static(2)), transport=worker.transport, **arguments)
        resumed.load_state_dict(state)
        worker.quantizer = worker.optimizer._compression = resumed
        resumed.attach(worker.optimizer)
        return levels + [level_of_a_step(worker, step) for step in range(at, 6)]

    results, _ = on_ranks(2, program, SIZES, 2, warmup_steps=3, warmup_bits=8)
    assert results == [[8, 8, 8, 2, 2, 2]] * 2
