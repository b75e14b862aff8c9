"""What curves.py runs on every rank. Not started by hand.

Its one argument is JSON: model, methods, steps, batch_size (None: the model's), seed, profile, device ("cpu" or
"cuda"), autocast, ddp (what carries torch's tensors), counted (whether hosts have interfaces to count by), output (the
results' file, beside which profiles lie), file. Rank 0 writes the file after each method.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import workloads
from bench.steppers import start_torch
from bench.worker import values_and_tensors
from common.device import choose
from hvd_dyncomp import replicas
from hvd_dyncomp.commands.probe.methods import Stepper
from hvd_dyncomp.commands.probe.turns import interface
from hvd_dyncomp.transport import ranks
from hvd_dyncomp.transport.base import gather_json
from netlab.shaping import INTERFACE
from train.profiling import LEAST, profile_of_steps

WARM_UP = 10  # steps that do not count for the speed
_NORM = 1.0  # that gradients are clipped to


def train(name: str, workload: workloads.Workload, spec: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """All steps of a method; what this rank has to tell of them. Collective."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    model, loss = workload()
    stepper = Stepper(name, model, loss, make_optimizer=workloads.optimizer_of(spec["model"]), norm=_NORM)
    counted_until = spec["steps"] - (LEAST if spec["profile"] else 0)
    losses = [stepper.step() for _ in range(WARM_UP)]
    before, began = _sent(stepper, spec["counted"]), time.perf_counter()
    losses += [stepper.step() for _ in range(WARM_UP, counted_until)]
    stepper.finish()
    steps, seconds = counted_until - WARM_UP, time.perf_counter() - began
    after = _sent(stepper, spec["counted"])
    if spec["profile"]:
        losses += _profiled(stepper, Path(spec["output"]), name, device)
    return {
        "losses": torch.stack(losses).tolist(),
        "seconds": seconds / steps,
        "sent": None if before is None or after is None else (after - before) / steps,
        "peak": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        "parameters": replicas.numbers(list(model.named_parameters())),
    }


def _sent(stepper: Stepper, counted: bool) -> float | None:
    """Bytes that this rank has sent: by its host's interface, or by the meter of ours. At a moment at which all ranks
    have done their steps.
    """
    stepper.finish()
    ranks.barrier()
    if counted:
        return interface(INTERFACE)()
    return None if stepper.quantizer is None else stepper.quantizer.meter.total().sent_bytes


def _profiled(stepper: Stepper, results: Path, name: str, device: torch.device) -> Iterator[Tensor]:
    """The last steps; rank 0 writes what torch sees of two of them, beside the results."""
    profile = None
    if ranks.transport().rank == 0:
        folder = results.with_name(f"{results.stem}-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        profile = profile_of_steps(folder, device, LEAST)
        profile.start()
    for _ in range(LEAST):
        yield stepper.step()
        stepper.finish()
        if profile is not None:
            profile.step()
    if profile is not None:
        profile.stop()


def of_all(everyone: list[dict[str, Any]], values: int) -> dict[str, Any]:
    """What `train` has returned on all ranks, as it is kept."""
    sent = [one["sent"] for one in everyone if one["sent"] is not None]
    peaks = [one["peak"] for one in everyone]
    return {
        "losses": [statistics.fmean(losses) for losses in zip(*(one["losses"] for one in everyone), strict=True)],
        "steps_per_second": 1 / max(one["seconds"] for one in everyone),
        "peak_bytes": None if None in peaks else peaks,
        "bits_per_value": 8 * statistics.fmean(sent) / values if sent else None,
        "replicas_equal": all(one["parameters"] == everyone[0]["parameters"] for one in everyone),
    }


def main() -> None:
    spec = json.loads(sys.argv[1])
    ranks.start(spec["ddp"])
    torch.set_num_threads(1)
    device = choose(spec["device"])
    start_torch(spec["ddp"], spec["methods"])
    rank, size = ranks.transport().rank, values_and_tensors(spec)
    batch_size = spec["batch_size"] or workloads.CURVE_MODELS[spec["model"]]
    about = {**{key: spec[key] for key in ("model", "device", "steps", "autocast")}, **size, "batch_size": batch_size}
    workload = workloads.curve(
        spec["model"], batch_size, seed=spec["seed"], rank=rank, device=device, autocast=spec["autocast"]
    )
    methods: dict[str, Any] = {}
    for name in spec["methods"]:
        everyone = gather_json(ranks.transport(), train(name, workload, spec, device), f"curves.{name}")
        methods[name] = of_all(everyone, size["values"])
        gc.collect()  # the model is gone before the next one's memory is measured
        if rank == 0:
            Path(spec["file"]).write_text(json.dumps({**about, "methods": methods}), encoding="utf-8")
            print(f"curves {spec['model']}: {name} trained", flush=True)
    ranks.end()


if __name__ == "__main__":
    main()
