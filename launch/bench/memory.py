"""How much memory an exchange takes, beside parameters and gradients.

    python launch/bench memory --layouts 2,3,2x2

A layout is a number of workers on this host, or HOSTSxWORKERS, workers of each host; hosts are network namespaces, and
need root. Every method has processes of its own and takes three steps, whose peak is compared with that of the same
steps without an exchange before: of what the process has in the host's memory (with what is pinned for a GPU, if Linux
counts it as the process's), and of what torch has allocated on the GPU. glibc is told to give back at once what is
freed. What does not grow with the model counts as well, but for code and kernels; Horovod's fusion buffer, of 128 MiB
by default, is such. Writes DIR/memory.json (with --launcher gloo, --device cuda: DIR/memory-gloo-cuda.json) and shows
it as Markdown. With --launcher torchrun no Horovod is needed, and the default methods are DDP's.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench import gpus, steppers
from bench.results import about, load, origin, save, suffix, typed
from bench.start import environment_of, place, start, worker
from bench.steps import add_shared_arguments
from bench.tables import title
from common.device import choose_for
from common.markdown import DASH, markdown
from common.values import count, names
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.commands.probe.methods import ALONE, Stepper
from hvd_dyncomp.commands.probe.tensors import Tensors
from hvd_dyncomp.transport.base import gather_json
from netlab.hosts import WITH_HOROVOD

TENSOR = 2**22  # values of each but the last
STEPS = 3
_FEW = 4096
_METHODS = ("none", "fp16", "0.25bit", "1bit", "4bit", "8bit")
_NAMES = (*steppers.HOROVOD, *steppers.OURS, *steppers.ONE_LEVEL.values(), *steppers.DDP)
# glibc keeps blocks that were freed for later, more or fewer as it happens: up to 4 bytes a value of ours. From so many
# bytes on, a block is given back at once, and what is measured is what is in use.
_ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": "65536"}
_KINDS = {"gpu": "GPU", "host": "host"}  # of memory, and how they are called where there are both


def file_name(by: str = "mpirun", device: str = "cpu") -> str:
    """Where the results of a launcher and a type of device are."""
    return f"memory{suffix(device, by)}.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run, known=_NAMES)
    add = parser.add_argument
    add("--values", type=count, default=100_000_000, metavar="N", help="of the model (default 100000000)")
    add("--layouts", type=_layouts, default=_layouts("2,3,2x2"), metavar="N,HxL,...", help="default 2,3,2x2")
    add("--methods", type=names(_NAMES), default=_METHODS, metavar="NAME,...", help=f"default {','.join(_METHODS)}")
    add_shared_arguments(parser)


def _layouts(text: str) -> dict[str, tuple[int, int]]:
    """By how it is written: hosts, and workers of each."""
    found = {part: re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)", part) for part in text.split(",")}
    layouts = {part: (int(match[1] or 1), int(match[2])) for part, match in found.items() if match}
    if len(layouts) != len(found):
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKERS or HOSTSxWORKERS, separated by commas")
    if any(hosts * workers < 2 for hosts, workers in layouts.values()):
        raise argparse.ArgumentTypeError(f"{text!r} has a worker by itself, which exchanges nothing")
    return layouts


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON file and show it as Markdown.

    Raises:
        RunError: the network cannot be made, no GPU can be used that should, or a worker failed. What was measured
            until then is kept.
    """
    most = max(hosts * workers for hosts, workers in args.layouts.values())
    device = choose_for(args.device, most, horovod=args.launcher in WITH_HOROVOD)
    found = gpus.found(most, args.launcher) if device == "cuda" else {}
    path = args.output_dir / file_name(args.launcher, device)
    environment = environment_of(args) | _ALLOCATION | (gpus.OVER_LINKS if found else {})
    results: dict[str, Any] = {
        "benchmark": "memory",
        "values": args.values,
        "device": device,
        "about": {**about(args.command, args.seed, environment, args.launcher), **found},
        "layouts": {},
    }
    for layout, (hosts, workers) in args.layouts.items():
        own = results["layouts"][layout] = {"hosts": hosts, "workers_per_host": workers, "contenders": {}}
        with place(hosts, workers, args.launcher) as there, tempfile.TemporaryDirectory(prefix="bench-") as folder:
            for name in args.methods:
                file = Path(folder, f"{name}.json")
                spec = {"methods": [name], "values": args.values, "seed": args.seed, "device": device}
                spec |= {"ddp": found.get("ddp", "gloo"), "file": str(file)}
                start(there.command(worker("memory", spec)), {**environment, **there.environment})
                own["contenders"][name] = load(file)
                save(path, results)
    print(report(results))


def report(results: Mapping[str, Any]) -> str:
    """Markdown: bytes a value, of the rank that takes least and of the one that takes most; and what was measured."""
    layouts = results["layouts"].values()
    kinds = [kind for kind in _KINDS if kind == "host" or gpus.on_gpus(results)]
    head = [f"{title_of(one)}{f', {_KINDS[kind]}' * (len(kinds) > 1)}" for one in layouts for kind in kinds]
    rows: dict[str, list[str]] = {name: [] for one in layouts for name in one["contenders"]}
    for one in layouts:
        for name, row in rows.items():
            ranks = one["contenders"].get(name)  # none where a run was cut off
            row += [_range([rank[kind] / results["values"] for rank in ranks]) if ranks else DASH for kind in kinds]
    table = markdown(("bytes a value", *head), [(title(name), *row) for name, row in rows.items()])
    note = results["about"]
    most = max(one["hosts"] * one["workers_per_host"] for one in layouts)
    return (
        f"{table}\n\n`{typed(note['command'])}`: {results['values'] / 1e6:.1f} million values in tensors of "
        f"{TENSOR / 1e6:.1f} million; peak over {STEPS} steps less that of as many steps without an exchange, of all "
        f"workers.{origin([note])}{gpus.sentence(note, most)}"
    )


def residual_bytes(hosts: int, workers: int) -> float:
    """A value, of one worker, as the exchange stores residuals: in bfloat16, its own and those of the sums that it
    makes (which two workers at the ends of one exchange do not have). On hosts of several workers, each exchanges a
    share of the host's sum.
    """
    ends = workers if hosts == 1 else hosts
    return (2 + (2 / ends if ends > 2 else 0)) / (1 if hosts == 1 else workers)


def _range(numbers: list[float]) -> str:
    low, high = f"{min(numbers):.1f}", f"{max(numbers):.1f}"
    return low if low == high else f"{low}–{high}"


def title_of(layout: Mapping[str, Any]) -> str:
    """How many workers, and where."""
    hosts, workers = layout["hosts"], layout["workers_per_host"]
    return f"{workers} workers" if hosts == 1 else f"{hosts} hosts of {workers}"


def peaks(device: torch.device) -> dict[str, int]:
    """Bytes that this process has held at most until now: of the host's memory, and of its GPU's."""
    found = {"host": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}
    if device.type == "cuda":
        found["gpu"] = torch.cuda.max_memory_allocated(device)
    return found


def take(steps: int, name: str, parameters: list[Tensor], gradient: Tensor) -> None:
    """Steps of a stepper, each of which hands over the same gradient for all parameters."""
    model = Tensors(parameters, [gradient[: parameter.numel()] for parameter in parameters])
    stepper = Stepper(name, model, lambda model: model())
    for _ in range(steps):
        stepper.step()
    stepper.finish()


def measure(spec: dict[str, Any], name: str, device: torch.device) -> dict[str, int]:
    """Collective."""
    values = spec["values"]
    generator = torch.Generator().manual_seed(1000 * spec["seed"] + ranks.transport().rank)
    gradient = torch.randn(min(values, TENSOR), generator=generator).to(device)
    parameters = [torch.zeros(TENSOR, device=device) for _ in range(values // TENSOR)]
    if values % TENSOR:
        parameters.append(torch.zeros(values % TENSOR, device=device))
    # Code, kernels and threads are there before, and do not pass for bytes of values.
    take(1, name, [torch.zeros(_FEW, device=device)], gradient[:_FEW])
    take(STEPS, ALONE, parameters, gradient)
    before = peaks(device)
    take(STEPS, name, parameters, gradient)
    return {name: peak - before[name] for name, peak in peaks(device).items()}


def work(spec: dict[str, Any], device: torch.device) -> None:
    """What every rank does, for one method in processes of its own.

    Args:
        spec: methods (a single one), values, seed, and file. Rank 0 writes that: for each rank the bytes by which the
            peak of its memory is higher than that of the same steps without an exchange.
        device: this rank's.
    """
    [name] = spec["methods"]
    everybody = gather_json(ranks.transport(), measure(spec, name, device), "memory.measured")
    if ranks.transport().rank == 0:
        Path(spec["file"]).write_text(json.dumps(everybody), encoding="utf-8")
