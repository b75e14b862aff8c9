"""Trains with LinkAware on a link whose rate changes, in turns with constant levels.

An epoch is a number of steps, which the constant levels and LinkAware take one after the other, in another order each
time: what else the machine does then touches all of them alike. In each phase the link may have another rate. Writes
DIR/changing-MODEL.json and shows it as Markdown.

The model "pauses" has 1.5 million values in six layers, and sleeps for 25 ms in forward and 75 ms in backward, in place
of computing: so a machine that does something else at the same time hardly changes the ratios.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench import workloads
from bench.results import SHARED_MEMORY, about, load, origin, save, typed
from bench.start import environment_of, start, worker
from bench.steps import WARM_UP, add_shared_arguments, checked_rate
from bench.tables import rate_title, title
from common.launcher import TORCHRUN
from common.markdown import markdown
from common.values import count, listed, names
from hvd_dyncomp import LinkAware
from hvd_dyncomp.commands import ranks
from hvd_dyncomp.commands.probe.methods import DDP, Loss, Stepper
from hvd_dyncomp.commands.probe.turns import slowest
from netlab.hosts import hosts
from netlab.shaping import shape

LINK_AWARE = "LinkAware"
PAUSES = "pauses"
_CONSTANT = ("2bit-ddp", "4bit-ddp", "8bit-ddp", "16bit-ddp")
_PHASES = "none:8,100mbit:12,none:10"
_WIDTH, _FORWARD_SECONDS, _LAYER_SECONDS = 500, 0.025, 0.0125
_SETTLED = 5  # the last epochs of a phase


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this benchmark can be told, and its defaults."""
    parser.set_defaults(run=run, known=DDP)
    add = parser.add_argument
    add("--model", choices=(PAUSES, *workloads.TRAINING_MODELS), default=PAUSES, help=f"default {PAUSES}")
    listing: dict[str, Any] = {"type": names(DDP), "default": _CONSTANT, "metavar": "NAME,..."}
    add("--methods", **listing, help=f"what is compared with LinkAware (default {','.join(_CONSTANT)})")
    add("--phases", type=_phases, default=_PHASES, metavar="RATE:EPOCHS,...", help=f"default {_PHASES}")
    add("--steps", type=count, default=10, metavar="N", help="of an epoch (default 10)")
    add_shared_arguments(parser, (TORCHRUN,))
    parser.set_defaults(launcher=TORCHRUN)


def _phases(text: str) -> tuple[tuple[str, int], ...]:
    found = listed(_phase)(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r} names no phase")
    return found


def _phase(text: str) -> tuple[str, int]:
    rate, _, epochs = text.partition(":")
    if rate == SHARED_MEMORY:
        raise argparse.ArgumentTypeError(f"{rate!r} is no link")
    return checked_rate(rate), count(epochs)


def run(args: argparse.Namespace) -> None:
    """Measure, write the JSON file and show it as Markdown.

    Raises:
        RunError: the network cannot be made, or a worker failed. What was measured until then is kept.
    """
    environment = environment_of(args)
    spec = {"model": args.model, "methods": args.methods, "phases": args.phases, "steps": args.steps, "seed": args.seed}
    note = about(args.command, args.seed, environment, args.launcher)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder, hosts() as lab:
        file = Path(folder, "phases.json")
        program = worker("changing", {**spec, "file": str(file)})
        try:
            start(lab.command(program, launcher=args.launcher), environment)
        finally:
            results = {"benchmark": "changing", "model": args.model, "steps": args.steps, "about": note, **load(file)}
            save(args.output_dir / f"changing-{args.model}.json", results)
    print(report(results))


def report(results: Mapping[str, Any]) -> str:
    """Markdown: for each phase, and for all, the seconds of all contenders, and what LinkAware did."""
    phases = results["phases"]
    rows = [_row(rate_title(phase["rate"]), phase["epochs"], " ".join(_levels(phase["epochs"]))) for phase in phases]
    if len(phases) > 1:
        rows.append(_row("all", [epoch for phase in phases for epoch in phase["epochs"]], ""))
    compared = [title(name) for name in _sums(phases[0]["epochs"]) if name != LINK_AWARE]
    best = f"{LINK_AWARE} against the best: all, last {_SETTLED} epochs"
    head = (f"{results['model']}: seconds", "epochs", *compared, LINK_AWARE, best, "its bits")
    return (
        f"{markdown(head, rows)}\n\n`{typed(results['about']['command'])}`: two hosts of one worker, epochs of "
        f"{results['steps']} steps; the best is the level with the shortest time in the row."
        f"{origin([results['about']])}"
    )


def _row(what: str, epochs: Sequence[Mapping[str, Any]], levels: str) -> tuple[str, ...]:
    seconds = _sums(epochs)
    ratios = f"{_against_best(epochs):.2f}" + (f", {_against_best(epochs[-_SETTLED:]):.2f}" if levels else "")
    return (what, f"{len(epochs)}", *(f"{one:.1f}" for one in seconds.values()), ratios, levels)


def _sums(epochs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all these epochs; LinkAware's last."""
    names = sorted(epochs[0]["seconds"], key=lambda name: name == LINK_AWARE)
    return {name: sum(epoch["seconds"][name] for epoch in epochs) for name in names}


def _against_best(epochs: Sequence[Mapping[str, Any]]) -> float:
    seconds = _sums(epochs)
    return seconds.pop(LINK_AWARE) / min(seconds.values())


def _levels(epochs: Sequence[Mapping[str, Any]]) -> list[str]:
    """The levels in order, those of several epochs in a row once, with their number."""
    runs = [(bits, len(list(same))) for bits, same in itertools.groupby(epoch["bits"] for epoch in epochs)]
    return [f"{bits:g}" + (f" (x{times})" if times > 1 else "") for bits, times in runs]


def work(spec: dict[str, Any], device: torch.device) -> None:
    """What every rank does.

    Args:
        spec: model, methods, phases (pairs of a rate and a number of epochs), steps of an epoch, seed, and file, which
            rank 0 writes after each phase.
        device: the CPU.
    """
    seed = 1000 * spec["seed"] + ranks.transport().rank
    workload = _pauses if spec["model"] == PAUSES else workloads.training(spec["model"], seed=seed)
    steppers = {name: Stepper(name, *workload()) for name in spec["methods"]}
    steppers[LINK_AWARE] = Stepper("8bit-ddp", *workload())
    steppers[LINK_AWARE].quantizer.controller.policy = LinkAware()  # which begins with 8 bits, too
    for stepper in steppers.values():
        for _ in range(WARM_UP):
            stepper.step()
    phases: list[dict[str, Any]] = []
    for rate, epochs in spec["phases"]:
        if ranks.local_rank() == 0:
            shape(rate)  # the others wait in the first barrier
        phases.append({"rate": rate, "epochs": []})
        for number in range(epochs):
            phases[-1]["epochs"].append(_epoch(steppers, spec["steps"], seed=f"{spec['seed']} {rate} {number}"))
        if ranks.transport().rank == 0:
            Path(spec["file"]).write_text(json.dumps({"phases": phases}), encoding="utf-8")
            print(f"changing {spec['model']}: {rate} measured", flush=True)


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
