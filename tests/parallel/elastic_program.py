"""An elastic job whose hosts come and go: what tests/parallel/test_elastic.py runs.

Its arguments are the file from which the discovery script reads the hosts, and what is to be written there, one stage
after the other. The first rank does it; a stage is over when the job has the stage's size and has made some steps.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch
from horovod.common.exceptions import HorovodInternalError
from problem import Problem, same_on_all_ranks

from hvd_dyncomp import Controller, DynamicQuantizer, Schedule

STEPS_PER_STAGE = 8
MOST_STEPS = 2000
FAILING_STEP = 5  # of the first stage: not committed, then gone


def main() -> None:
    hosts, stages = Path(sys.argv[1]), [stage.split(",") for stage in sys.argv[2:]]
    hvd.init()
    torch.set_num_threads(1)
    controller = Controller(Schedule({0: 4, 1: 2, 2: 8, 3: 32, 4: 1}))
    quantizer = DynamicQuantizer(controller)
    problem = Problem(compression=quantizer)
    model = torch.nn.ParameterList(problem.parameters.values())
    state = hvd.elastic.TorchState(
        model=model, optimizer=problem.optimizer, quantizer=quantizer, controller=controller,
        step=0, stage=0, stage_steps=0, failed=False, trace=[],
    )  # fmt: skip
    state.register_reset_callbacks([lambda: None])
    failing = {"done": False}

    @hvd.elastic.run
    def train(state) -> None:
        while state.stage < len(stages) and state.step < MOST_STEPS:
            if state.stage_steps == FAILING_STEP and state.stage == 0 and not failing["done"]:
                failing["done"] = True
                lose_a_step(state, problem, quantizer)
            one_step(state, problem, quantizer)
            reached = hvd.size() == len(stages[state.stage])
            state.stage_steps += reached
            if state.stage_steps == STEPS_PER_STAGE:
                state.trace = [*state.trace, (hvd.size(), controller.bits)]
                state.stage, state.stage_steps = state.stage + 1, 0
                controller.step({})
            if hvd.rank() == 0 and state.stage < len(stages):
                hosts.write_text("".join(f"{host}:1\n" for host in stages[state.stage]))
            time.sleep(0.05)
            state.commit()

    train(state)
    if hvd.rank() == 0:
        print(f"ELASTIC {state.trace} in {state.step} steps", flush=True)


def one_step(state, problem: Problem, quantizer: DynamicQuantizer) -> None:
    wanted = problem.draw(seed=state.step)
    reduced = problem.reduce(wanted)
    problem.step()
    state.step += 1
    # In the large: the sum of what was applied is the sum of means, but for what residuals owe.
    mean = hvd.allreduce(wanted["long"], name="mean")
    assert (reduced["long"] - mean).norm() < 3 * mean.norm()
    assert same_on_all_ranks(problem.parameters.values(), "parameters"), f"replicas differ after step {state.step}"
    levels = hvd.allgather_object((quantizer.bits, quantizer._steps), name="levels")
    assert len(set(levels)) == 1, levels


def lose_a_step(state, problem: Problem, quantizer: DynamicQuantizer) -> None:
    """A step and an epoch that are never committed, and an error as Horovod raises when a worker dies."""
    state.save()
    before = [parameter.detach().clone() for parameter in problem.parameters.values()]
    residuals, steps = quantizer.state_dict()["residuals"], quantizer._steps
    one_step(state, problem, quantizer)
    quantizer.controller.step({})
    state.restore()
    assert quantizer._steps == steps and quantizer.controller.history == []
    assert all(torch.equal(a, b) for a, b in zip(before, problem.parameters.values(), strict=True))
    kept = quantizer.state_dict()["residuals"]
    assert all(torch.equal(residuals[name], kept[name]) for name in residuals)
    raise HorovodInternalError("as if a worker had died")


if __name__ == "__main__":
    main()
