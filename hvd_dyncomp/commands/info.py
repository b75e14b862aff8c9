"""The command `info`: what is installed and what serves here, in lines for a report of a fault."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import hvd_dyncomp
from hvd_dyncomp import kernels
from hvd_dyncomp.exchange.wire import WIRE_VERSION
from hvd_dyncomp.transport.launched import by_launcher, rank_by_launcher

BEYOND_BASELINE = {"avx512": "AVX-512 with F, BW, DQ and VL", "avx2": "AVX2"}
OPTIONAL = ("mpi4py", "matplotlib", "jinja2", "tensorboard", "transformers", "accelerate", "lightning")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, of which there are none."""
    parser.set_defaults(parser=parser)


def main(args: argparse.Namespace) -> int:
    """Print the lines; not collective. Returns 0."""
    width = max(map(len, LINES))
    for name, text in LINES.items():
        sys.stdout.write(f"{name:<{width}}  {text()}\n")
    return 0


def _package() -> str:
    return f"{hvd_dyncomp.__version__}, wire format version {WIRE_VERSION}, in {Path(hvd_dyncomp.__file__).parent}"


def _machine() -> str:
    model = platform.machine()
    if (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = f"{names[0]} ({model})" if names else model
    return f"{platform.platform()}; {model}, {len(os.sched_getaffinity(0))} cores for this process"


def _torch() -> str:
    has = torch.distributed
    backends = [
        name for name in ("gloo", "nccl", "mpi") if has.is_available() and getattr(has, f"is_{name}_available")()
    ]
    return f"{torch.__version__}; process groups: {', '.join(backends) or 'none'}"


def _gpus() -> str:
    if not torch.cuda.is_available():
        return "none that torch can use"
    count = torch.cuda.device_count()
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "missing"
    return f"{count} x {torch.cuda.get_device_name(0)}; CUDA {torch.version.cuda}, NCCL {nccl}"


def _horovod() -> str:
    try:
        hvd = importlib.import_module("horovod.torch")
    except ImportError as error:
        return f"cannot be imported: {error}"
    built = [name for name in ("mpi", "gloo", "nccl") if getattr(hvd, f"{name}_built")()]
    return f"{importlib.import_module('horovod').__version__} with {', '.join(built)}"


def _mpi() -> str:
    found = shutil.which("mpirun")
    if found is None:
        return "no mpirun on the path"
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{found} does not run: {error}"
    return f"{said.splitlines()[0] if said else 'no version'} ({found})"


def _cpu_kernels() -> str:
    variants = kernels.native.variants() if kernels.native is not None else list(BEYOND_BASELINE)
    lacks = "".join(
        f"; this processor has no {words}" for name, words in BEYOND_BASELINE.items() if name not in variants
    )
    return kernels.served_by("cpu") + lacks


def _launcher() -> str:
    sizes = by_launcher()
    if not sizes:
        return "none: this process was started alone"
    return f"rank {rank_by_launcher()}; " + ", ".join(f"{name}={size}" for name, size in sizes.items())


def _optional() -> str:
    found = []
    for name in OPTIONAL:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or "none"


LINES: dict[str, Callable[[], str]] = {
    "hvd_dyncomp": _package,
    "Python": lambda: f"{platform.python_version()} in {sys.prefix}",
    "machine": _machine,
    "torch": _torch,
    "GPUs": _gpus,
    "Horovod": _horovod,
    "MPI": _mpi,
    "kernels, CPU": _cpu_kernels,
    "kernels, GPU": lambda: kernels.served_by("cuda") if torch.cuda.is_available() else "none needed",
    "launcher": _launcher,
    "optional": _optional,
}
