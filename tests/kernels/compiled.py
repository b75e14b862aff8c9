"""Compiles the Triton kernels for GPUs that need not be there, and prints what came of it: a JSON object for each.

    python tests/kernels/compiled.py 4,0.25 80,90          # levels, compute capabilities
    python tests/kernels/compiled.py 4 90 --with-fusion    # as it would be without our option

For test_triton.py, in a process of its own: in the other one Triton interprets.
"""

import argparse
import itertools
import json
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hvd_dyncomp.kernels.triton import tiles
from hvd_dyncomp.kernels.triton.form import form_of
from hvd_dyncomp.kernels.triton.operations import options

NUMBERS = {"entries": "i32", "first": "i64", "versions": "i32", "real": "i64", "blocks": "i32"}
TYPES = {
    "out": "*u8",
    "table": "*i64",
    "residual": "*i16",
    "dither": "i32",
    "factor": "fp32",
    **NUMBERS,
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def kinds() -> Iterator[tuple[str, object, dict]]:
    """Every call that compiles to something of its own, by name: the kernel, and its constants."""
    yield "decode", tiles.decode, {}
    for reduce, residual in itertools.product((False, True), repeat=2):
        constants = {"FROM_VERSIONS": reduce, "RESIDUAL": residual}
        yield called(constants), tiles.encode, constants


def called(constants: dict) -> str:
    """What a call is called here."""
    name = "reduce" if constants["FROM_VERSIONS"] else "encode"
    return name + ", residual" * constants["RESIDUAL"]


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of stack, shared and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(number) for name, number in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", said)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("levels", type=lambda text: [float(part) for part in text.split(",")])
    parser.add_argument("capabilities", type=lambda text: [int(part) for part in text.split(",")])
    parser.add_argument("--block-size", type=int, default=512)
    parser.add_argument("--with-fusion", action="store_true")
    asked = parser.parse_args()
    for capability in asked.capabilities:
        for level in asked.levels:
            bits = level if level < 1 else int(level)
            form = form_of(bits, asked.block_size)
            for name, kernel, constants in kinds():
                constants = {"FORM": form, **constants}
                signature = {arg: "constexpr" if arg in constants else TYPES[arg] for arg in kernel.arg_names}
                source = ASTSource(kernel, signature, constexprs=constants)
                told = options(form) | ({"enable_fp_fusion": True} if asked.with_fusion else {})
                made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=told)
                about = {"kernel": name, "bits": bits, "capability": capability, **resources(made.asm["cubin"])}
                weight = form.rms or form.reach
                about |= {"weight": weight.hex(), "weight_bits": f"0d{struct.pack('>d', weight).hex()}"}
                print(json.dumps({**about, "ptx": made.asm["ptx"]}), flush=True)


if __name__ == "__main__":
    main()
