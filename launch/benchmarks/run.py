"""Runs worker.py over links of several rates and over shared memory, and keeps what was measured."""

from __future__ import annotations

import argparse
import contextlib
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpus
from benchmarks.contenders import check_names
from benchmarks.results import FOLDER, about, load, save
from benchmarks.sharded import SHARDED
from benchmarks.start import environment_of, on_this_host, start, worker
from common.device import choose_for
from common.errors import RunError
from common.values import DEVICES, at_least_zero, count, natural
from lab import link_rate
from lab.hosts import LAUNCHERS, hosts
from lab.shaping import INTERFACE, bits_per_second

SHARED_MEMORY = "shm"
_DEVICE = "auto: GPUs where all workers can use one; their results have files of their own, -cuda.json (default cpu)"
_PORT = 29500


def add_arguments(parser: argparse.ArgumentParser, *, contenders: Sequence[str], rates: str, seconds: float) -> None:
    """What the benchmarks of single steps can be told, and their defaults."""
    add = parser.add_argument
    told = "see the list below; all of them in one run, in turns"
    add("--methods", dest="contenders", type=_contenders, default=tuple(contenders), metavar="NAME,...", help=told)
    add("--rates", type=_rates, default=rates, metavar="RATE,...", help="link rates; none: no limit; shm: no link")
    add("--seconds", type=at_least_zero, default=seconds, metavar="S", help="about so long for each rate")
    add("--rounds", type=count, default=25, metavar="N", help="most steps of each method and rate")
    add_shared_arguments(parser)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """How many workers take part in a benchmark, and where."""
    add = parser.add_argument
    add("--workers", type=count, default=2, metavar="N", help="of all hosts together (default 2)")
    add("--workers-per-host", type=count, default=1, metavar="L", help="default 1; over shm all are on one host")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of several workers can be told."""
    add = parser.add_argument
    add("--launcher", choices=LAUNCHERS, default="mpirun", help="gloo: Horovod without MPI (default mpirun)")
    add("--cycle-time", type=at_least_zero, default=1.0, metavar="MS", help="HOROVOD_CYCLE_TIME of all (default 1)")
    add("--seed", type=natural, default=0, help="of gradients, batches and the order of turns (default 0)")
    add("--device", choices=DEVICES, default="cpu", help=_DEVICE)
    add("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"where the JSON file goes (default {FOLDER})")


def suffix(by: str, device: str) -> str:
    """What the names of files end with: figures of Horovod with and without MPI, of GPUs and CPUs are kept apart."""
    return ("-gloo" if by == "gloo" else "") + gpus.suffix(device)


def _list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _contenders(text: str) -> tuple[str, ...]:
    try:
        return check_names(_list(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def checked_rate(text: str) -> str:
    """How a link's rate is written, or "shm" for no link."""
    try:
        if text != SHARED_MEMORY:
            bits_per_second(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _rates(text: str) -> tuple[str, ...]:
    rates = map(checked_rate, _list(text))
    # From fast to slow, so that warming up is short.
    return tuple(
        sorted(rates, key=lambda rate: -1 * ((bits_per_second(rate) or 1e18) if rate != SHARED_MEMORY else 1e19))
    )


def run(kind: str, model: str, args: argparse.Namespace) -> Path:
    """Measure one model at all rates; returns the JSON file, which holds earlier runs' other rates as well.

    Raises:
        RunError: the network cannot be made, the workers cannot be placed so, or use no GPU that they should, or the
            program failed. What was measured until then is kept.
        subprocess.TimeoutExpired: it took longer than an hour.
    """
    layout = _layout(args)
    device = choose_for(args.device, args.workers)
    found = gpus.found(args.workers) if device == "cuda" else {}
    path = args.output_dir / f"{kind}-{model}-{layout}{suffix(args.launcher, device)}.json"
    spec = {key: getattr(args, key) for key in ("contenders", "seconds", "rounds", "seed", "workers_per_host")}
    spec |= {"kind": kind, "model": model, "device": device, "ddp": found.get("ddp", "gloo")}
    links = [rate for rate in args.rates if rate != SHARED_MEMORY]
    for rates, job in (([SHARED_MEMORY] if SHARED_MEMORY in args.rates else [], _shared_memory), (links, _over_links)):
        if not rates:
            continue
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            environment = environment_of(args)
            note = about(args.command, args.seed, environment)
            try:
                reached = job({**spec, "rates": rates, "folder": folder}, args, environment)
            finally:
                what = {"workers": args.workers, "workers_per_host": args.workers_per_host, "device": device}
                _keep(path, Path(folder), rates, {"benchmark": kind, "model": model, **what})
            _describe(path, rates, {**note, **found, "launcher": args.launcher}, reached)
    return path


def _layout(args: argparse.Namespace) -> str:
    """Where the workers are, for the file's name: "2x4" for two hosts of four workers, "4" for four hosts of one."""
    workers, per_host = args.workers, args.workers_per_host
    if per_host == 1:
        return str(workers)
    if workers % per_host or workers == per_host:
        raise RunError(f"{workers} workers are not several hosts of {per_host} each")
    if SHARED_MEMORY in args.rates and not set(args.contenders) <= set(SHARDED):
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
        gloo = {"GLOO_SOCKET_IFNAME": INTERFACE, "MASTER_ADDR": lab.addresses[0], "MASTER_PORT": str(_PORT)}
        nccl = gpus.OVER_LINKS if spec["device"] == "cuda" else {}
        start(lab.command(worker("worker", spec), launcher=args.launcher), environment | gloo | nccl)
    return reached


def _shared_memory(spec: dict[str, Any], args: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    gloo = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    start(on_this_host(worker("worker", spec), args.workers, args.launcher), environment | gloo)
    return {}


def _keep(path: Path, folder: Path, rates: Sequence[str], what: dict[str, Any]) -> None:
    """Put what the workers have written into the benchmark's file, beside the rates that it has already."""
    results = load(path) or {**what, "rates": {}}
    for rate in rates:
        measured = load(folder / f"{rate}.json")
        if measured:
            results["values"], results["tensors"] = measured["values"], measured["tensors"]
            results["rates"][rate] = {"contenders": measured["contenders"]}
            save(path, results)


def _describe(path: Path, rates: Sequence[str], about: dict[str, Any], reached: dict[str, float]) -> None:
    results = load(path)
    for rate in rates:
        results["rates"][rate]["about"] = {**about, "payload_mbit": reached.get(rate)}
    save(path, results)


def _free_port() -> int:
    with contextlib.closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
