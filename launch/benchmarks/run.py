"""Runs worker.py over links of several rates and over shared memory, and keeps what was measured."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import gpus
from benchmarks.contenders import check_names
from benchmarks.results import FOLDER, about, load, save
from common import launcher, mpi_settings
from common.device import choose_for
from common.errors import RunError
from common.values import DEVICES, at_least_zero, count, natural
from lab import link_rate
from lab.hosts import LAUNCHERS, hosts
from lab.shaping import INTERFACE, bits_per_second

SHARED_MEMORY = "shm"
_LAUNCH = Path(__file__).parents[1]
_TIMEOUT = 3600.0
_DEVICE = "auto: GPUs where all workers can use one; their results have files of their own, -cuda.json (default cpu)"
_PORT = 29500


def add_arguments(parser: argparse.ArgumentParser, *, contenders: Sequence[str], rates: str, seconds: float) -> None:
    """What the benchmarks of single steps can be told, and their defaults."""
    add = parser.add_argument
    told = "see the list below; all of them in one run, in turns"
    add("--contenders", type=_contenders, default=tuple(contenders), metavar="NAME,...", help=told)
    add("--rates", type=_rates, default=rates, metavar="RATE,...", help="link rates; none: unshaped; shm: no link")
    add("--launcher", choices=LAUNCHERS, default="mpirun", help="gloo: Horovod without MPI (default mpirun)")
    add("--seconds", type=at_least_zero, default=seconds, metavar="S", help="about so long for each rate")
    add("--rounds", type=count, default=25, metavar="N", help="most steps of each contender and rate")
    add_shared_arguments(parser)


def add_workers(parser: argparse.ArgumentParser) -> None:
    """How many workers take part in a benchmark, and where."""
    add = parser.add_argument
    add("--workers", type=count, default=2, metavar="N", help="of all hosts together (default 2)")
    add("--workers-per-host", type=count, default=1, metavar="L", help="default 1; over shm all are on one host")


def add_shared_arguments(parser: argparse.ArgumentParser) -> None:
    """What every benchmark of several workers can be told."""
    add = parser.add_argument
    add("--cycle-time", type=at_least_zero, default=1.0, metavar="MS", help="HOROVOD_CYCLE_TIME of all (default 1)")
    add("--seed", type=natural, default=0, help="of gradients, batches and the order of turns (default 0)")
    add("--device", choices=DEVICES, default="cpu", help=_DEVICE)
    add("--output-dir", type=Path, default=FOLDER, metavar="DIR", help=f"where the JSON file goes (default {FOLDER})")


def _list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


def _contenders(text: str) -> tuple[str, ...]:
    try:
        return check_names(_list(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _rates(text: str) -> tuple[str, ...]:
    rates = _list(text)
    for rate in rates:
        try:
            if rate != SHARED_MEMORY:
                bits_per_second(rate)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
    # From fast to slow, so that warming up is short.
    return tuple(sorted(rates, key=lambda rate: -1 * ((bits_per_second(rate) or 1e18) if rate != "shm" else 1e19)))


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
    suffix = ("-gloo" if args.launcher == "gloo" else "") + gpus.suffix(device)
    path = args.output_dir / f"{kind}-{model}-{layout}{suffix}.json"
    spec = {key: getattr(args, key) for key in ("contenders", "seconds", "rounds", "seed")}
    spec |= {"kind": kind, "model": model, "device": device, "ddp": found.get("ddp", "gloo")}
    links = [rate for rate in args.rates if rate != SHARED_MEMORY]
    for rates, job in (([SHARED_MEMORY] if SHARED_MEMORY in args.rates else [], _shared_memory), (links, _over_links)):
        if not rates:
            continue
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            environment = _environment(args)
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
    if SHARED_MEMORY in args.rates:
        raise RunError(f"over {SHARED_MEMORY} all workers are on one host: --workers-per-host is for links")
    return f"{workers // per_host}x{per_host}"


def _environment(args: argparse.Namespace) -> dict[str, str]:
    """What every contender runs under."""
    return {
        "HOROVOD_CYCLE_TIME": f"{args.cycle_time:g}",
        # Contenders times tensors is more than the 1,024 names that Horovod remembers the negotiation of.
        "HOROVOD_CACHE_CAPACITY": "16384",
        "OMP_NUM_THREADS": "1",
        **mpi_settings.DEFAULTS,
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # Gloo warns about addresses without names
    }


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
        _start(lab.command(_program(spec), launcher=args.launcher), environment | gloo | nccl)
    return reached


def _shared_memory(spec: dict[str, Any], args: argparse.Namespace, environment: dict[str, str]) -> dict[str, float]:
    gloo = {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    if args.launcher == "mpirun":
        as_root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
        command = ["mpirun", *as_root, "--oversubscribe", "--bind-to", "none", "-np", str(args.workers)]
        command += _program(spec)
    else:
        options = ["--gloo"] if args.launcher == "gloo" else ["--mpi"]
        command = launcher.horovodrun(args.workers, _program(spec)[1:], *options)
    _start(command, environment | gloo)
    return {}


def _program(spec: dict[str, Any]) -> list[str]:
    # -P: the package that is installed, not the source tree that this may be called from.
    return [sys.executable, "-P", "-m", "benchmarks.worker", json.dumps(spec)]


def _start(command: Sequence[str], environment: dict[str, str]) -> None:
    path = os.pathsep.join(filter(None, (str(_LAUNCH), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    ended = launcher.run(command, timeout=_TIMEOUT, output=sys.stderr, env=env)
    if ended.returncode:
        raise RunError(f"the benchmark's worker ended with status {ended.returncode}; what it said is above")


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
