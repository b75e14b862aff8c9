"""The command itself: `torchrun ... -m hvd_dyncomp probe`, on every rank."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from hvd_dyncomp.commands import ranks
from hvd_dyncomp.commands.probe import findings, turns
from hvd_dyncomp.commands.probe.methods import ALONE, POWERSGD_START, Stepper
from hvd_dyncomp.commands.probe.tensors import MODELS, Shape, count, evenly, noise, shapes_of
from hvd_dyncomp.levels import levels_argument
from hvd_dyncomp.transport.base import gather_json
from hvd_dyncomp.transport.launched import processes

_UNITS = {"": 1, "K": 1e3, "M": 1e6, "B": 1e9}
_WARM_UP = POWERSGD_START + 2  # negotiation, buckets that DDP builds again, PowerSGD's plain steps
_ROUNDS = 40
_LATENCIES = 30
_COUNTED = 0.05  # of the bytes of a float32 exchange must leave by an interface, or it is not the way that they take
_TORCHS = ("ddp", "ddp-bf16", "powersgd1", "powersgd4")
_HOROVODS = ("none", "fp16")


def _values(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMB]?)", text.upper())
    if match is None or float(match[1]) * _UNITS[match[2]] < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of values such as 25.6M")
    return round(float(match[1]) * _UNITS[match[2]])


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _new_file(text: str) -> Path:
    """Looked at before anything is measured: a minute's figures would be lost."""
    if not Path(text).absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not in a folder that exists")
    return Path(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `python -m hvd_dyncomp probe`."""
    add = parser.add_argument
    what = parser.add_mutually_exclusive_group()
    models = ", ".join(MODELS)
    what.add_argument("--model", choices=MODELS, default="resnet50", metavar="NAME", help=f"{models}; default resnet50")
    what.add_argument(
        "--values", type=_values, metavar="N", help="so many values, such as 25.6M, in place of a model's"
    )
    add("--backward-ms", type=_positive, default=0.0, metavar="MS", help="backward takes so long beside the exchange")
    add(
        "--levels",
        type=levels_argument,
        default="8,4,1,0.25",
        metavar="BITS,...",
        help="levels to time; default %(default)s",
    )
    add("--seconds", type=_positive, default=40.0, metavar="S", help="about so long in all; default 40")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPUs where every rank has one")
    add("--json", type=_new_file, metavar="FILE", help="write all that was measured")


class _Refused(Exception):
    """On all ranks."""


def main(args: argparse.Namespace) -> int:
    """Measure, and print on rank 0.

    Returns:
        0; 2 after one line on stderr if there is one rank only, or fewer are connected than a launcher has started, or
        no GPU is there where one is asked for.
    """
    try:
        if processes() == 1:
            raise _Refused(
                "one rank exchanges nothing: start one for each GPU, or each host, such as torchrun --nnodes 2 "
                "--nproc-per-node 8 --rdzv-endpoint HOST:29500 --rdzv-backend c10d -m hvd_dyncomp probe"
            )
        try:
            ranks.start()
        except ImportError as error:
            raise _Refused(f"{error}; or start it with torchrun, without Horovod") from error
        except ranks.RanksMissing as error:
            raise _Refused(f"{error}") from error
        try:
            _measure(args)
        finally:
            ranks.end()
    except _Refused as error:
        sys.stderr.write(f"hvd_dyncomp probe: error: {error}\n")
        return 2
    return 0


def _measure(args: argparse.Namespace) -> None:
    everyone = ranks.transport()
    device = _device(args.device)
    shapes = evenly(args.values) if args.values else shapes_of(args.model)
    steppers = _steppers(shapes, args, device)
    bar = _Bar(args.seconds) if everyone.rank == 0 else None
    counter = _counter(steppers, 4 * count(shapes))
    latencies = [_timed(_smallest(device)) for _ in range(_LATENCIES)]
    measured = turns.measure(
        steppers,
        seconds=args.seconds,
        rounds=_ROUNDS,
        seed=0,
        counter=counter,
        said=bar.show if bar is not None else None,
    )
    hosts = sum(gather_json(everyone, ranks.local_rank() == 0, "probe.hosts"))
    if bar is not None:
        bar.close()
        where = "one host" if hosts == 1 else f"{hosts} hosts"
        _print(args, shapes, measured, latencies, f"{everyone.size} ranks on {where}, {device.type}")


def _device(wish: str) -> torch.device:
    """This rank's device. Collective.

    Raises:
        _Refused: GPUs are asked for, and a rank has none; on every rank.
    """
    if wish == "cpu":
        return torch.device("cpu")
    here = torch.cuda.is_available() and ranks.local_rank() < torch.cuda.device_count()
    have = gather_json(ranks.transport(), here, "probe.gpus")
    if not all(have):
        if wish == "cuda":
            raise _Refused(f"--device cuda: rank {have.index(False)} has no GPU of its own")
        return torch.device("cpu")
    device = torch.device("cuda", ranks.local_rank())
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # Horovod waits for the default stream before each message
    return device


def _steppers(shapes: list[Shape], args: argparse.Namespace, device: torch.device) -> dict[str, Stepper]:
    """Every method, warmed up. Collective."""
    make = noise(shapes, seed=ranks.transport().rank, device=device, seconds=args.backward_ms / 1e3)
    theirs, kind = (_TORCHS, "bit-ddp") if ranks.under_torchrun() else (_HOROVODS, "bit")
    steppers = {
        name: Stepper(name, *make()) for name in (ALONE, *theirs, *(f"{level:g}{kind}" for level in args.levels))
    }
    for stepper in steppers.values():
        for _ in range(_WARM_UP):
            stepper.step()
    return steppers


def _counter(steppers: dict[str, Stepper], nbytes: int) -> turns.Counter | None:
    """The counter of the interface by which gradients leave this host; None if not every host has one. Collective."""
    plain = next(stepper for name, stepper in steppers.items() if name != ALONE)
    ranks.barrier()

    def exchange() -> None:
        plain.step()
        plain.finish()
        ranks.barrier()

    found = turns.busiest(exchange, int(_COUNTED * nbytes))
    return found if all(gather_json(ranks.transport(), found is not None, "probe.counters")) else None


def _smallest(device: torch.device) -> Callable[[], Any]:
    value = torch.zeros(1, device=device)
    if ranks.under_torchrun():
        return lambda: (torch.distributed.all_reduce(value), value.item())
    import horovod.torch as hvd

    return lambda: hvd.allreduce(value, name="probe.smallest").item()


def _timed(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - began)


class _Bar:
    """A progress bar, if tqdm is installed; or else a line."""

    def __init__(self, seconds: float) -> None:
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            sys.stderr.write(f"hvd_dyncomp probe: about {seconds:.0f} s\n")
        else:
            self._bar = tqdm(desc="probe", unit="step")

    def show(self, over: int, steps: int) -> None:
        if self._bar is not None:
            self._bar.total = steps
            self._bar.update(over - self._bar.n)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _print(
    args: argparse.Namespace, shapes: list[Shape], measured: dict[str, Any], latencies: list[float], job: str
) -> None:
    found = findings.rows(measured)
    what = "" if args.values else f"{args.model}, "
    beside = f", beside {args.backward_ms:g} ms of backward" if args.backward_ms else ""
    said = findings.advice(found, args.backward_ms)
    lines = [
        f"{job}: {what}{findings.size(count(shapes), len(shapes))}{beside}",
        findings.table(found),
        findings.link(found, latencies),
        said,
    ]
    sys.stdout.write("\n" + "\n\n".join(lines) + "\n")
    if args.json:
        about = {"job": job, "model": None if args.values else args.model, "values": count(shapes)}
        about |= {"tensors": len(shapes), "backward_ms": args.backward_ms, "torch": torch.__version__}
        result = {**about, "latency_ms": median(latencies), "methods": measured, "advice": said}
        args.json.write_text(json.dumps(result, indent=1), encoding="utf-8")
