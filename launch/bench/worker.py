"""What the benchmarks run on every rank. Started by steps.py, not by hand.

Its one argument is JSON: kind, model, methods, rates, seconds, rounds, seed, device ("cpu" or "cuda"), ddp (what
carries torch's tensors), workers_per_host, folder. Rank 0 writes a file RATE.json into the folder as soon as a rate is
finished.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from bench import workloads
from bench.results import SHARED_MEMORY
from bench.sharded import SHARDED, mesh
from bench.steppers import start_torch, stepper_of
from common.device import choose
from hvd_dyncomp.commands.probe.methods import POWERSGD_START, Stepper
from hvd_dyncomp.commands.probe.turns import interface, measure
from hvd_dyncomp.transport import ranks
from netlab.shaping import INTERFACE, shape

# Negotiation, buckets that DDP builds again after the first step, PowerSGD's plain steps: over after so many.
WARM_UP = POWERSGD_START + 2


def build(spec: dict[str, Any], device: torch.device) -> dict[str, Stepper]:
    """The steppers, warmed up. Collective."""
    kind = {"exchange": workloads.exchange, "training": workloads.training}[spec["kind"]]
    workload = kind(spec["model"], seed=1000 * spec["seed"] + ranks.transport().rank, device=device)
    groups = None
    if any(name in SHARDED for name in spec["methods"]):
        groups = mesh(device, ranks.transport().size // spec["workers_per_host"], spec["workers_per_host"])
    make = workloads.tiny_steps_of(spec["model"])
    steppers = {name: stepper_of(name, *workload(), groups, make_optimizer=make) for name in spec["methods"]}
    for stepper in steppers.values():
        for _ in range(WARM_UP):
            stepper.step()
    return steppers


def values_and_tensors(spec: dict[str, Any]) -> dict[str, int]:
    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in workloads.build(spec["model"]).parameters()]
    return {"values": sum(sizes), "tensors": len(sizes)}


def main() -> None:
    spec = json.loads(sys.argv[1])
    ranks.start(spec["ddp"])
    torch.set_num_threads(1)
    device = choose(spec["device"])
    start_torch(spec["ddp"], spec["methods"])
    steppers = build(spec, device)
    for rate in spec["rates"]:
        if rate != SHARED_MEMORY and ranks.local_rank() == 0:
            shape(rate)  # the others wait in the first barrier of what is measured
        limits = {key: spec[key] for key in ("seconds", "rounds", "seed")}
        measured = measure(steppers, **limits, counter=interface(INTERFACE) if rate != SHARED_MEMORY else None)
        if ranks.transport().rank == 0:
            result = {**values_and_tensors(spec), "contenders": measured}
            Path(spec["folder"], f"{rate}.json").write_text(json.dumps(result), encoding="utf-8")
            print(f"{spec['kind']} {spec['model']}: {rate} measured", flush=True)
    ranks.end()


if __name__ == "__main__":
    main()
