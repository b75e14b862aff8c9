"""How training goes with each method: losses, speed and memory, from the same weights and on the same batches.

    python launch/bench curves                                   # torchrun, two workers: no Horovod is needed
    python launch/bench curves --device cuda --profile
    python launch/bench curves --models resnet8,tiny --steps 40  # on a small machine

The methods train one after the other, in one job for each model. Every step has a new batch: a transformer reads the
text of Python's help() and is trained by AdamW; images are a class's prototype plus noise, and are trained on by SGD
with momentum. Gradients are clipped to a norm of 1. On GPUs, or with --autocast, a model computes in bfloat16.

Writes DIR/curves-MODEL-WORKERS-torchrun.json (without -torchrun over MPI; with -gloo, -cuda): for each method the
losses of all steps (means over workers), steps per second after a warm-up of 10 steps, the peak of each worker's memory
on its GPU, bits per value (by the interface's counter over links, else by the meter of ours), and whether all workers
have the same weights in the end, bit for bit. With --profile also what torch's profiler saw of two late steps on the
first worker: DIR/curves-MODEL-WORKERS-torchrun-METHOD/profile.json.gz. The last steps do not count for the speed then.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import gpus, steppers, workloads
from bench.results import SHARED_MEMORY, about, load, origin, save, suffix, typed
from bench.start import environment_of, place, start, worker
from bench.steps import add_shared_arguments, checked_rate
from bench.tables import rate_title, title
from bench.workloads import CURVE_MODELS
from common.device import choose_for
from common.errors import RunError
from common.markdown import DASH, markdown
from common.values import count, names
from hvd_dyncomp import replicas
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.commands.probe.methods import Stepper
from hvd_dyncomp.commands.probe.turns import interface
from hvd_dyncomp.transport.base import gather_json
from netlab.hosts import WITH_HOROVOD
from netlab.shaping import INTERFACE
from train.profiling import LEAST, profile_of_steps

WARM_UP = 10  # steps that do not count for the speed
_NORM = 1.0  # that gradients are clipped to
_LAST = 10  # steps whose mean loss is shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run, known=steppers.DDP)
    add, models, methods = parser.add_argument, ("resnet18", "transformer-50m"), ("ddp", "4bit-ddp")
    add("--models", type=names(CURVE_MODELS), default=models, metavar="NAME,...", help=f"default {','.join(models)}")
    add("--methods", type=names(steppers.DDP), default=methods, metavar="NAME,...", help=f"default {','.join(methods)}")
    add("--steps", type=count, default=100, metavar="N", help="of each method (default 100)")
    add("--batch-size", type=count, metavar="N", help="images or texts per worker and step (default: the model's)")
    add("--workers", type=count, default=2, metavar="N", help="default 2")
    add("--rate", type=checked_rate, default=SHARED_MEMORY, help="of links between hosts of one worker (default shm)")
    add("--autocast", action="store_true", help="bfloat16 on CPUs, too")
    add("--profile", action="store_true", help="record two late steps")
    add_shared_arguments(parser)


def run(args: argparse.Namespace) -> None:
    """Train every model with every method, write the JSON files and show them as Markdown.

    Raises:
        RunError: there are too few steps, the network cannot be made, no GPU can be used that should, or a worker
            failed. What was measured until then is kept.
    """
    least = WARM_UP + (LEAST if args.profile else 0)
    if args.steps <= least:
        raise RunError(f"--steps {args.steps}: more than {least} are needed")
    device = choose_for(args.device, args.workers, horovod=args.launcher in WITH_HOROVOD)
    found = gpus.found(args.workers, args.launcher) if device == "cuda" else {}
    in_memory = args.rate == SHARED_MEMORY
    where = (1, args.workers, args.launcher) if in_memory else (args.workers, 1, args.launcher, args.rate)
    environment = environment_of(args) | (gpus.OVER_LINKS if found and not in_memory else {})
    shared = {key: getattr(args, key) for key in ("methods", "steps", "batch_size", "seed", "profile")}
    shared |= {
        "device": device,
        "autocast": args.autocast or device == "cuda",
        "counted": not in_memory,
        "ddp": found.get("ddp", "gloo"),
    }
    for model in args.models:
        note = about(args.command, args.seed, environment, args.launcher)
        path = args.output_dir / f"curves-{model}-{args.workers}{suffix(device, args.launcher)}.json"
        what = {"benchmark": "curves", "workers": args.workers, "rate": args.rate, "about": {**note, **found}}
        with place(*where) as there, tempfile.TemporaryDirectory(prefix="bench-") as folder:
            file = Path(folder, "curves.json")
            spec = {**shared, "model": model, "output": str(path.absolute()), "file": str(file)}
            try:
                start(there.command(worker("curves", spec)), {**environment, **there.environment})
            finally:
                if file.exists():
                    save(path, {**what, **load(file)})
        print(report(load(path)))


def report(results: Mapping[str, Any]) -> str:
    """Markdown: a row for each method."""
    what = f"{results['model']}, {results['workers']} workers, {rate_title(results['rate'])}"
    speed = ("steps per second", "peak of GPU memory, GB", "bits per value", "equal replicas")
    head = (what, "loss of the first step", f"mean of the last {_LAST}", *speed)
    note, table = results["about"], markdown(head, [_row(name, one) for name, one in results["methods"].items()])
    return (
        f"{table}\n\n`{typed(note['command'])}`: "
        f"{results['values'] / 1e6:.1f} million values, {results['batch_size']} samples per worker and step, "
        f"{results['steps']} steps{', bfloat16' if results['autocast'] else ''}.{origin([note])}"
        f"{gpus.sentence(note, results['workers'])}"
    )


def _row(name: str, one: Mapping[str, Any]) -> tuple[str, ...]:
    losses, peaks, bits = one["losses"], one["peak_bytes"], one["bits_per_value"]
    peak = DASH if peaks is None else f"{max(peaks) / 1e9:.2f}"
    sent = DASH if bits is None else f"{bits:.2f}"
    scores = (f"{losses[0]:.3f}", f"{statistics.fmean(losses[-_LAST:]):.3f}", f"{one['steps_per_second']:.2f}")
    return (title(name), *scores, peak, sent, "yes" if one["replicas_equal"] else "no")


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


def work(spec: dict[str, Any], device: torch.device) -> None:
    """What every rank does: trains with one method after the other.

    Args:
        spec: model, methods, steps, batch_size (None: the model's), seed, profile, autocast, counted (whether hosts
            have interfaces to count by), output (the results' file, beside which profiles lie), and file, which rank 0
            writes after each method.
        device: this rank's.
    """
    rank, size = ranks.transport().rank, workloads.size(spec["model"])
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
