"""An elastic job whose hosts come and go: what tests/on_horovod/test_elastic.py runs.

    elastic_program.py HOSTS STAGE...

HOSTS is the file from which the discovery script reads; a stage is the hosts that are to be in the job, with their
workers: "one:2,two:2".
The first rank writes the next stage's hosts there when this one has made some steps at its full size. Before a stage
that begins with "!", nothing is written: the first rank dies in the middle of a step instead.
"""

from __future__ import annotations

import io
import os
import signal
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
LOST_STEP = 5  # of the first stage: made, but never committed


class Job:
    """What is trained, and what must be true of it all the time."""

    def __init__(self) -> None:
        self.controller = Controller(Schedule({0: 4, 1: 2, 2: 8, 3: 32, 4: 1, 5: 4}))
        self.quantizer = DynamicQuantizer(self.controller)
        self.problem = Problem(compression=self.quantizer)
        self.committed = b""
        self.place = (0, 0)  # rank and size at the last step

    def state(self) -> hvd.elastic.TorchState:
        return hvd.elastic.TorchState(
            model=torch.nn.ParameterList(self.problem.parameters.values()),
            optimizer=self.problem.optimizer,
            quantizer=self.quantizer,
            controller=self.controller,
            **{"step": 0, "stage": 0, "stage_steps": 0, "lost": False, "trace": []},
        )

    def one_step(self, state) -> None:
        # What bfloat16 can hold, in which gradients travel within a host: then nothing is lost there.
        wanted = {name: value.bfloat16().float() for name, value in self.problem.draw(seed=state.step).items()}
        reduced = self.problem.reduce(wanted)
        self.problem.step()
        state.step += 1
        self.check_owed(wanted, reduced)
        # Roughly: error feedback owes something of earlier steps as well.
        mean = hvd.allreduce(wanted["long"], name="mean")
        assert (reduced["long"] - mean).norm() < 3 * mean.norm()
        assert same_on_all_ranks(self.problem.parameters.values(), "parameters"), f"replicas differ after {state.step}"
        levels = hvd.allgather_object((self.quantizer.bits, self.quantizer.state_dict()["steps"]), name="levels")
        assert len(set(levels)) == 1, levels

    def check_owed(self, wanted: dict[str, torch.Tensor], reduced: dict[str, torch.Tensor]) -> None:
        """What arrives, and what is owed afterwards, is what was put in, and what was owed at the last commit.

        After a change of ranks nothing is owed.

        Not what the quantizer says that it has loaded: only the exchange shows what became of it. All of it is linear,
        so it holds for sums over all values, wherever a shard begins.
        """
        given, owed = flat(wanted), held(self.quantizer.state_dict())
        then, place = owed.new_zeros(1), (hvd.rank(), hvd.size())
        if all(hvd.allgather_object(bool(self.committed) and place == self.place, name="places")):
            then = held(torch.load(io.BytesIO(self.committed))[1])
        sums = torch.stack([given.sum() + then.sum(), owed.sum(), squares(owed, then)])
        before, after, residuals = hvd.allreduce(sums, op=hvd.Sum, name="owed").tolist()
        lost = before - after - hvd.size() * flat(reduced).sum().item()
        # A residual is bfloat16, rounded at random: by a 2**-8 of itself at most, in standard deviations.
        rounding = 5 * 2**-8 * residuals**0.5
        self.place = place
        assert abs(lost) < 2e-3 + rounding, f"{lost} of {before} is neither delivered nor owed"

    def everything(self) -> bytes:
        """All that a step changes, but for this rank's number."""
        parameters = {name: p.detach() for name, p in self.problem.parameters.items()}
        quantizer = {**self.quantizer.state_dict(), "rank": None}
        # The meter counts seconds as well, and not the same ones.
        quantizer["meter"] = self.quantizer.meter.total().sent_bytes
        blob = io.BytesIO()
        torch.save([parameters, quantizer, self.controller.state_dict()], blob)
        return blob.getvalue()

    def check_committed(self) -> None:
        assert self.everything() == self.committed, "a step that was not committed has left something behind"

    def die_in_backward(self) -> None:
        """With some gradients handed out, and others not."""
        self.problem.parameters["odd"].register_hook(lambda gradient: os.kill(os.getpid(), signal.SIGKILL))


def flat(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([torch.empty(0).double(), *(tensor.double().flatten() for tensor in tensors.values())])


def squares(*tensors: torch.Tensor) -> torch.Tensor:
    return torch.cat(tensors).square().sum()


def held(quantizer: dict) -> torch.Tensor:
    """All values of a rank's residuals. Padding has none."""
    shards = {name: shard["values"] for name, shard in quantizer["shard_residuals"].items()}
    return torch.cat([flat(quantizer["residuals"]), flat(shards)])


def announce(hosts: Path, names: list[str]) -> None:
    """Tells the discovery script which hosts there are; it must never read half a file."""
    fresh = hosts.with_suffix(".new")
    fresh.write_text("".join(f"{name}\n" for name in names))
    fresh.replace(hosts)


def main() -> None:
    hosts = Path(sys.argv[1])
    stages = [stage.lstrip("!").split(",") for stage in sys.argv[2:]]
    deadly = [stage.startswith("!") for stage in sys.argv[2:]]
    sizes = [sum(int(host.split(":")[1]) for host in stage) for stage in stages]
    hvd.init()
    torch.set_num_threads(1)
    job = Job()
    state = job.state()
    state.register_reset_callbacks([job.check_committed])

    @hvd.elastic.run
    def train(state) -> None:
        while state.stage < len(stages) and state.step < MOST_STEPS:
            if hvd.rank() == 0 and state.stage_steps == 0:
                if not deadly[state.stage]:
                    announce(hosts, stages[state.stage])
                elif hvd.size() > sizes[state.stage]:
                    job.die_in_backward()
            job.one_step(state)
            if state.stage_steps == LOST_STEP and not state.lost:
                # What Horovod raises when a worker dies. `lost` alone must survive.
                state._saved_state["lost"] = True
                job.controller.step({})
                raise HorovodInternalError("as if a worker had died")
            state.stage_steps += hvd.size() == sizes[state.stage]
            if state.stage_steps == STEPS_PER_STAGE:
                state.trace = [*state.trace, (hvd.size(), job.quantizer.bits)]
                state.stage, state.stage_steps = state.stage + 1, 0
                job.controller.step({})
            time.sleep(0.05)
            job.committed = job.everything()
            state.commit()

    train(state)
    if hvd.rank() == 0:
        print(f"ELASTIC {state.trace}", flush=True)


if __name__ == "__main__":
    main()
