"""Trains on a link whose rate changes. Started by changing.py on every rank.

Its one argument is JSON: model, methods, auto (the name of one more), phases (pairs of a rate and a number of steps),
seconds, seed, file. In each phase the methods take turns, and then the last one takes all of its steps in a row. Rank 0
writes the file after each phase.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from bench import workloads
from bench.worker import WARM_UP, values_and_tensors
from hvd_dyncomp.commands.probe.methods import Stepper
from hvd_dyncomp.commands.probe.turns import interface, measure
from netlab.shaping import INTERFACE, shape

_AS_LONG_AS_IT_TAKES = 1e9


def main() -> None:
    spec = json.loads(sys.argv[1])
    hvd.init()
    torch.set_num_threads(1)
    workload = workloads.training(spec["model"], seed=1000 * spec["seed"] + hvd.rank())
    constant = {name: Stepper(name, *workload()) for name in spec["methods"]}
    for stepper in constant.values():
        for _ in range(WARM_UP):
            stepper.step()
    adaptive = {spec["auto"]: Stepper(spec["auto"], *workload())}
    phases: list[dict[str, Any]] = []
    for rate, steps in spec["phases"]:
        if hvd.local_rank() == 0:
            shape(rate)  # the others wait in the first barrier of what is measured
        counter = interface(INTERFACE)
        found = measure(constant, seconds=spec["seconds"], rounds=25, seed=spec["seed"], counter=counter)
        found |= measure(adaptive, seconds=_AS_LONG_AS_IT_TAKES, rounds=steps, seed=spec["seed"], counter=counter)
        phases.append({"rate": rate, "steps": steps, "contenders": found})
        if hvd.rank() == 0:
            Path(spec["file"]).write_text(json.dumps({**values_and_tensors(spec), "phases": phases}), encoding="utf-8")
            print(f"changing {spec['model']}: {rate} measured", flush=True)
    hvd.barrier()


if __name__ == "__main__":
    main()
