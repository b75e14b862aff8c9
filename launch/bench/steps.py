"""The parts that time steps: the exchange alone, on hosts of one worker or several, and real training steps.

All methods take turns in one process group, over links of several rates and over shared memory.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import gpus, steppers, tables, workloads
from bench.results import FOLDER, SHARED_MEMORY, about, is_current, load, save, suffix
from bench.sharded import SHARDED, mesh
from bench.start import environment_of, for_torch, on_this_host, start, worker
from common.device import choose_for
from common.errors import RunError
from common.values import DEVICES, at_least_zero, count, layout, listed, names, natural
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.commands.probe.methods import POWERSGD_START, Stepper
from hvd_dyncomp.commands.probe.turns import interface, measure
from netlab import link_rate
from netlab.hosts import LAUNCHERS, WITH_HOROVOD, hosts
from netlab.shaping import INTERFACE, bits_per_second, shape

# Negotiation, buckets that DDP builds again after the first step, PowerSGD's plain steps: over after so many.
WARM_UP = POWERSGD_START + 2
_DEVICE = "auto: GPUs where all workers can use one; their results have files of their own, -cuda.json (default cpu)"
_BITS = ("1bit", "2bit", "4bit", "8bit")
_ON_HOSTS = ("none", "fp16", "0.25bit", "1bit", "4bit", "1bit-flat", "4bit-flat")
_IN_TRAINING = ("alone", "none", "fp16", "0.25bit", *_BITS, "ddp", "ddp-fp16", "powersgd1")


def exchange(parser: argparse.ArgumentParser) -> None:
    """Times the exchange of a model's gradients, and nothing else, at several link rates.

    A step is a backward pass that hands over gradients which lie ready, the exchange, and the optimizer's update.
    Writes DIR/exchange-MODEL-WORKERS.json, with --workers-per-host DIR/exchange-MODEL-HOSTSxWORKERS.json.
    """
    _add_model(parser)
    _add_workers(parser)
    _add_steps(parser, steppers.DEFAULT, "100mbit,1gbit,10gbit,none,shm", 60)
    parser.set_defaults(run=lambda args: run("exchange", args.model, args))


def on_hosts(parser: argparse.ArgumentParser) -> None:
    """Times the exchange on hosts of several workers, where one interface serves all of a host.

    A layout is HOSTSxWORKERS, workers of each host; bits per value are those that a host's interface sent. The rest is
    as in the part "exchange". Writes DIR/exchange-MODEL-LAYOUT.json.
    """
    _add_model(parser)
    every = "2x2,2x4,4x2"
    parser.add_argument("--layouts", type=listed(layout), default=every, metavar="HxL,...", help=f"default {every}")
    _add_steps(parser, _ON_HOSTS, "100mbit,1gbit,10gbit", 40)
    parser.set_defaults(run=_run_layouts)


def _run_layouts(args: argparse.Namespace) -> None:
    for number, workers in args.layouts:
        args.workers, args.workers_per_host = number * workers, workers
        run("exchange", args.model, args)


def training(parser: argparse.ArgumentParser) -> None:
    """Times forward, backward, exchange and update of models at several link rates.

    Writes DIR/training-MODEL-WORKERS.json, with --workers-per-host DIR/training-MODEL-HOSTSxWORKERS.json.
    """
    every = "resnet20,resnet18,mlp,transformer"
    known = names(workloads.TRAINING_MODELS)
    parser.add_argument("--models", type=known, default=every, metavar="NAME,...", help=f"default {every}")
    _add_workers(parser)
    _add_steps(parser, _IN_TRAINING, "100mbit,1gbit,10gbit,shm", 25)
    parser.set_defaults(run=_run_models)


def _run_models(args: argparse.Namespace) -> None:
    for model in args.models:
        run("training", model, args)


def _add_model(parser: argparse.ArgumentParser) -> None:
    models = workloads.EXCHANGE_MODELS
    parser.add_argument("--model", choices=models, default="resnet50", help="whose tensors (default resnet50)")


def _add_workers(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=count, default=2, metavar="N", help="of all hosts together (default 2)")
    add("--workers-per-host", type=count, default=1, metavar="L", help="default 1; over shm all are on one host")


def _add_steps(parser: argparse.ArgumentParser, methods: Sequence[str], rates: str, seconds: float) -> None:
    parser.epilog = steppers.__doc__
    parser.set_defaults(known=steppers.NAMES)
    add, known = parser.add_argument, names(steppers.NAMES)
    add("--methods", type=known, default=tuple(methods), metavar="NAME,...", help="of the list below; in turns")
    add("--rates", type=_rates, default=rates, metavar="RATE,...", help="link rates; none: no limit; shm: no link")
    add("--seconds", type=at_least_zero, default=seconds, metavar="S", help="about so long for each rate")
    add("--rounds", type=count, default=25, metavar="N", help="most steps of each method and rate")
    add_shared_arguments(parser)


def add_shared_arguments(parser: argparse.ArgumentParser, launchers: Sequence[str] = LAUNCHERS) -> None:
    """What every benchmark of several workers can be told."""
    add = parser.add_argument
    add(
        "--launcher",
        choices=launchers,
        default="mpirun",
        help="gloo: Horovod without MPI; torchrun: no Horovod (default %(default)s)",
    )
    add("--cycle-time", type=at_least_zero, default=1.0, metavar="MS", help="HOROVOD_CYCLE_TIME of all (default 1)")
    add("--seed", type=natural, default=0, help="of gradients, batches and the order of turns (default 0)")
    add("--device", choices=DEVICES, default="cpu", help=_DEVICE)
    add("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"where the JSON file goes (default {FOLDER})")


def checked_rate(text: str) -> str:
    """How a link's rate is written, or "shm" for no link."""
    try:
        if text != SHARED_MEMORY:
            bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _rates(text: str) -> tuple[str, ...]:
    """From fast to slow, so that warming up is short."""
    return tuple(sorted(listed(checked_rate)(text), key=tables.by_rate, reverse=True))


def run(kind: str, model: str, args: argparse.Namespace) -> None:
    """Measure one model at all rates, into the JSON file with earlier runs' other rates, and show it as Markdown.

    Raises:
        RunError: the network cannot be made, the workers cannot be placed so, or use no GPU that they should, or the
            program failed. What was measured until then is kept.
        subprocess.TimeoutExpired: it took longer than an hour.
    """
    where = _layout(args)
    device = choose_for(args.device, args.workers, horovod=args.launcher in WITH_HOROVOD)
    found = gpus.found(args.workers, args.launcher) if device == "cuda" else {}
    path = args.output_dir / f"{kind}-{model}-{where}{suffix(device, args.launcher)}.json"
    spec = {key: getattr(args, key) for key in ("methods", "seconds", "rounds", "seed", "workers_per_host")}
    spec |= {"kind": kind, "model": model, "device": device, "ddp": found.get("ddp", "gloo")}
    links = [rate for rate in args.rates if rate != SHARED_MEMORY]
    for rates, job in (([SHARED_MEMORY] if SHARED_MEMORY in args.rates else [], _shared_memory), (links, _over_links)):
        if not rates:
            continue
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            environment = environment_of(args)
            note = about(args.command, args.seed, environment, args.launcher)
            try:
                reached = job({**spec, "rates": rates, "folder": folder}, args, environment)
            finally:
                what = {"workers": args.workers, "workers_per_host": args.workers_per_host, "device": device}
                _keep(path, Path(folder), rates, {"benchmark": kind, "model": model, **what})
            _describe(path, rates, {**note, **found}, reached)
    results = load(path)
    gains = tables.gains(results) if args.part == "hosts" else ""
    print("\n\n".join(filter(None, [tables.times(results), gains, tables.bits(results), tables.caption(results)])))


def _layout(args: argparse.Namespace) -> str:
    """Where the workers are, for the file's name: "2x4" for two hosts of four workers, "4" for four hosts of one."""
    workers, per_host = args.workers, args.workers_per_host
    if per_host == 1:
        return str(workers)
    if workers % per_host or workers == per_host:
        raise RunError(f"{workers} workers are not several hosts of {per_host} each")
    if SHARED_MEMORY in args.rates and not set(args.methods) <= set(SHARDED):
        raise RunError(
            f"over {SHARED_MEMORY} all workers are on one host: --workers-per-host is for links, and for FSDP2's shards"
        )
    return f"{workers // per_host}x{per_host}"


def _over_links(spec: dict[str, Any], args: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    """Returns Mbit/s of payload that each link carried in a plain TCP transfer beforehand."""
    reached = {}
    with hosts(args.workers // args.workers_per_host, workers_per_host=args.workers_per_host) as lab:
        for rate in spec["rates"]:
            lab.set_rate(rate)
            reached[rate] = link_rate.measure(lab, int((bits_per_second(rate) or 10e9) / 8)) / 1e6
        lab.set_rate("none")
        over_nccl = gpus.OVER_LINKS_ONLY if args.workers_per_host == 1 else gpus.OVER_LINKS
        nccl = over_nccl if spec["device"] == "cuda" else {}
        start(lab.command(worker("steps", spec), launcher=args.launcher), environment | for_torch(lab) | nccl)
    return reached


def _shared_memory(spec: dict[str, Any], args: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    start(on_this_host(worker("steps", spec), args.workers, args.launcher), environment | for_torch())
    return {}


def _keep(path: Path, folder: Path, rates: Sequence[str], what: dict[str, Any]) -> None:
    """Put what the workers have written into the benchmark's file, beside its other rates of this wire version."""
    results = load(path) or {**what, "rates": {}}
    results["rates"] = {rate: found for rate, found in results["rates"].items() if is_current(found)}
    for rate in rates:
        measured = load(folder / f"{rate}.json")
        if measured:
            results["values"], results["tensors"] = measured["values"], measured["tensors"]
            results["rates"][rate] = {"contenders": measured["contenders"]}
            save(path, results)


def _describe(path: Path, rates: Sequence[str], note: dict[str, Any], reached: dict[str, float]) -> None:
    results = load(path)
    for rate in rates:
        results["rates"][rate]["about"] = {**note, "payload_mbit": reached.get(rate)}
    save(path, results)


def build(spec: dict[str, Any], device: torch.device) -> dict[str, Stepper]:
    """The steppers, warmed up. Collective."""
    kind = {"exchange": workloads.exchange, "training": workloads.training}[spec["kind"]]
    workload = kind(spec["model"], seed=1000 * spec["seed"] + ranks.transport().rank, device=device)
    groups = None
    if any(name in SHARDED for name in spec["methods"]):
        groups = mesh(device, ranks.transport().size // spec["workers_per_host"], spec["workers_per_host"])
    make = workloads.tiny_steps_of(spec["model"])
    found = {name: steppers.stepper_of(name, *workload(), groups, make_optimizer=make) for name in spec["methods"]}
    for stepper in found.values():
        for _ in range(WARM_UP):
            stepper.step()
    return found


def work(spec: dict[str, Any], device: torch.device) -> None:
    """What every rank does: all methods take turns, at one rate after the other.

    Args:
        spec: kind, model, methods, rates, seconds, rounds, seed, workers_per_host, and folder, into which rank 0 writes
            a file RATE.json as soon as a rate is finished.
        device: this rank's.
    """
    taking_turns = build(spec, device)
    for rate in spec["rates"]:
        if rate != SHARED_MEMORY and ranks.local_rank() == 0:
            shape(rate)  # the others wait in the first barrier of what is measured
        limits = {key: spec[key] for key in ("seconds", "rounds", "seed")}
        measured = measure(taking_turns, **limits, counter=interface(INTERFACE) if rate != SHARED_MEMORY else None)
        if ranks.transport().rank == 0:
            result = {**workloads.size(spec["model"]), "contenders": measured}
            Path(spec["folder"], f"{rate}.json").write_text(json.dumps(result), encoding="utf-8")
            print(f"{spec['kind']} {spec['model']}: {rate} measured", flush=True)
