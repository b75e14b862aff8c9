"""Trains on a link whose rate changes. Started by changing.py on every rank.

Its one argument is JSON: model, methods, phases (pairs of a rate and a number of epochs), steps of an epoch, seed,
file. Rank 0 writes the file after each phase.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import workloads
from bench.changing import LINK_AWARE, PAUSES
from bench.worker import WARM_UP
from hvd_dyncomp import LinkAware
from hvd_dyncomp.commands.probe.methods import Loss, Stepper
from hvd_dyncomp.commands.probe.turns import slowest
from hvd_dyncomp.transport import ranks
from netlab.shaping import shape

_WIDTH, _FORWARD_SECONDS, _LAYER_SECONDS = 500, 0.025, 0.0125


def main() -> None:
    spec = json.loads(sys.argv[1])
    ranks.start("gloo")
    torch.set_num_threads(1)
    seed = 1000 * spec["seed"] + ranks.transport().rank
    workload = _pauses if spec["model"] == PAUSES else workloads.training(spec["model"], seed=seed)
    steppers = {name: Stepper(name, *workload()) for name in spec["methods"]}
    steppers[LINK_AWARE] = Stepper("8bit-ddp", *workload())
    steppers[LINK_AWARE].quantizer.controller.policy = LinkAware()  # which begins with 8 bits, too
    for stepper in steppers.values():
        for _ in range(WARM_UP):
            stepper.step()
    phases: list[dict[str, Any]] = []
    for rate, count in spec["phases"]:
        if ranks.local_rank() == 0:
            shape(rate)  # the others wait in the first barrier
        phases.append({"rate": rate, "epochs": []})
        for number in range(count):
            phases[-1]["epochs"].append(_epoch(steppers, spec["steps"], seed=f"{spec['seed']} {rate} {number}"))
        if ranks.transport().rank == 0:
            Path(spec["file"]).write_text(json.dumps({"phases": phases}), encoding="utf-8")
            print(f"changing {spec['model']}: {rate} measured", flush=True)
    ranks.end()


class _Pause(torch.autograd.Function):
    """Sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(_LAYER_SECONDS)
        return gradient


class _Layer(nn.Linear):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _Pause.apply(super().forward(values))


def _pauses() -> tuple[nn.Module, Loss]:
    """A model that sleeps in place of computing, the same on all ranks, and its loss."""

    def loss(model: nn.Module) -> torch.Tensor:
        time.sleep(_FORWARD_SECONDS)
        return model(torch.ones(1, _WIDTH)).sum()

    torch.manual_seed(0)
    return nn.Sequential(*(_Layer(_WIDTH, _WIDTH) for _ in range(6))), loss


def _epoch(steppers: Mapping[str, Stepper], steps: int, *, seed: str) -> dict[str, Any]:
    """One epoch of each stepper. Collective.

    Returns:
        "seconds" of each on the slowest rank; "bits" and "waited", LinkAware's level and the share that it was told.
    """
    order = list(steppers)
    random.Random(seed).shuffle(order)
    seconds, quantizer = {}, steppers[LINK_AWARE].quantizer
    bits = quantizer.bits
    for name in order:
        ranks.barrier()
        quantizer.meter.waited()  # the others' time is not its
        began = time.perf_counter()
        for _ in range(steps):
            steppers[name].step()
        if name == LINK_AWARE:
            quantizer.controller.step({"waited": quantizer.meter.waited()})
        seconds[name] = slowest(time.perf_counter() - began, name)
    waited = quantizer.controller.history[-1].metrics["waited"]
    return {"seconds": seconds, "bits": bits, "waited": waited}


if __name__ == "__main__":
    main()
