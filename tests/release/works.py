"""Run by the Python of a new environment that has the package but no Horovod: does it do there what it can?

It needs the package with its extra "report", and psutil. The last line says what it did, with which versions.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy
import torch

import hvd_dyncomp
from hvd_dyncomp.kernels import backends, block_bytes, decode_into, encode_into

TRAINS = Path(__file__).with_name("trains.py")
HELPERS = [Path(__file__).parents[1], Path(__file__).parents[2] / "launch"]  # whose modules start ranks
SECONDS = 300  # that ranks may take
BLOCK_SIZE = 512
WITHOUT = "hvd_dyncomp needs Horovod built for torch"


def coded(bits: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Bytes, residual and decoded values of the same vector, by the kernels in use."""
    values = torch.linspace(-1, 1, 9 * BLOCK_SIZE).sin()
    out = torch.empty(9 * block_bytes(bits, BLOCK_SIZE), dtype=torch.uint8)
    residual, back = torch.zeros_like(values, dtype=torch.bfloat16), torch.empty_like(values)
    encode_into(out, [values], residual, bits=bits, block_size=BLOCK_SIZE)
    decode_into([back], [out], bits=bits, block_size=BLOCK_SIZE)
    assert torch.allclose(back + residual, values, atol=2**-7), f"{bits} bits: what is lost is not in the residual"
    return out, residual, back


def check_kernels() -> str:
    levels = hvd_dyncomp.LEVELS[:-1]
    native = backends.pop("cpu")  # the reference kernels serve from here on
    expected = [coded(bits) for bits in levels]
    backends["cpu"] = native
    for bits, theirs in zip(levels, expected, strict=True):
        assert all(map(torch.equal, coded(bits), theirs)), f"{bits} bits: native and reference kernels differ"
    return native.variants()[0]


def check_what_horovod_is_needed_for() -> None:
    importing = [sys.executable, "-P", "-c", "import hvd_dyncomp; hvd_dyncomp.DynamicQuantizer"]
    said = subprocess.run(importing, capture_output=True, text=True, timeout=120).stderr
    assert f"ImportError: {WITHOUT}" in said and "Warning" not in said, said


def check_report() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "metrics.jsonl").write_text(json.dumps({"epoch": 0, "level": 4}) + "\n", encoding="utf-8")
        command = [sys.executable, "-P", "-m", "hvd_dyncomp", "report", folder]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        assert "<h1>Training run" in Path(folder, "report.html").read_text(encoding="utf-8")


def check_ranks(front_end: str, ranks: int) -> str:
    """On how many it trains, or else what it says in place of that."""
    from torchrun import run_program

    done = run_program(ranks, TRAINS, front_end, seconds=SECONDS)
    assert done.returncode == 0, done.stdout
    [said] = re.findall(r"^said: (.*)$", done.stdout, re.MULTILINE)
    return f"on {ranks} ranks" if said == "trained" else f"refused ({said})"


if __name__ == "__main__":
    sys.path[:0] = map(str, HELPERS)
    variant = check_kernels()
    check_what_horovod_is_needed_for()
    check_report()
    trained = {"DDP": ("ddp", 2), "Averager": ("averager", 2), "FSDP2": ("fsdp", 4)}
    python = ".".join(map(str, sys.version_info[:3]))
    print(
        *(f"Python {python}", f"torch {torch.__version__}", f"numpy {numpy.__version__}"),
        *(f"hvd_dyncomp {hvd_dyncomp.__version__}", f"kernels {variant}"),
        *(f"{name} {check_ranks(*how)}" for name, how in trained.items()),
        sep=", ",
    )
