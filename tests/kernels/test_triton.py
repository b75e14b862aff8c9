"""The Triton kernels equal their specification bit for bit, and what the compiler makes of them can do so, too.

Without a GPU they run in Triton's interpreter, which is numpy. It cannot show what a compiler may do to arithmetic: so
they are compiled as well, for GPUs that need not be there (compiled.py), and no instruction may be an approximation.
Where there is a GPU, the same checks run on it: `pytest tests/kernels`, or with TRITON_INTERPRET=1 those of the
interpreter.
"""

import functools
import importlib.util
import json
import logging
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import equality
import pytest
import torch
from equality import each_level, residual_of, same_bits, serving
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, portable, reduce_into

pytestmark = pytest.mark.promise("Native and GPU kernels give the results of the reference kernels, bit for bit.")

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

# Triton decides whether to interpret when a kernel is defined, its own library's among them; and some of that it
# imports when a kernel runs. No other test is to see the variable.
with pytest.MonkeyPatch.context() as patch:
    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")
    from triton.runtime.interpreter import InterpretedFunction

    from hvd_dyncomp.kernels import triton
    from hvd_dyncomp.kernels.triton import operations, tiles

INTERPRETED = isinstance(tiles.encode, InterpretedFunction)
DEVICE = "cpu" if INTERPRETED else "cuda"
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="there is no GPU, or TRITON_INTERPRET is set")
COMPILER = [sys.executable, str(Path(__file__).with_name("compiled.py"))]


@pytest.fixture(autouse=True)
def served(monkeypatch):
    if INTERPRETED:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    with serving(triton, DEVICE):
        yield


def test_where_there_is_no_gpu_triton_interprets():
    assert INTERPRETED or torch.cuda.is_available()


@each_level
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_encode(bits, data):
    equality.check_encode(data, bits, DEVICE)


@each_level
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_decode_and_reduce(bits, data):
    equality.check_decode_and_reduce(data, bits, DEVICE)


@pytest.mark.parametrize("bits", [0.125, 0.5, 1, 4, 16])
@pytest.mark.parametrize("block_size", [2048, 8192, 16384])
def test_large_blocks(bits, block_size):
    """Those of more than 8192 values are left to `portable`."""
    equality.check_large_blocks(bits, block_size, DEVICE)


@each_level
def test_squares_beyond_float32(bits):
    equality.check_squares_beyond_float32(bits, DEVICE)


@pytest.mark.parametrize("bits", [0.125, 3])
def test_many_versions(bits):
    equality.check_many_versions(bits, DEVICE)


@pytest.mark.parametrize("bits", [0.125, 0.5, 1, 4])
def test_few_real_values(bits):
    equality.check_few_real_values(bits, DEVICE)


def test_ties_of_bfloat16():
    equality.check_ties_of_bfloat16(DEVICE)


def test_sums_run_over_halves():
    equality.check_sums_run_over_halves(DEVICE)


def test_a_bucket_of_very_many_tensors():
    equality.check_a_bucket_of_very_many_tensors(DEVICE)


def test_blocks_too_large_are_those_of_the_reference(monkeypatch):
    launches = []
    monkeypatch.setattr(operations, "_launch", lambda *_, **__: launches.append(1))
    for size, launched in ((8192, 3), (16384, 0)):
        out, values = torch.zeros(block_bytes(4, size), dtype=torch.uint8, device=DEVICE), torch.ones(size).to(DEVICE)
        encode_into(out, [values], None, bits=4, block_size=size)
        decode_into([values], [out], bits=4, block_size=size)
        reduce_into(out.clone(), [out], None, bits=4, block_size=size)
        assert len(launches) == launched
        launches.clear()


GPU = types.SimpleNamespace(is_cpu=False, device=torch.device("cuda"))  # all that is asked of a tensor here


def test_the_first_tensor_on_a_gpu_brings_triton(monkeypatch):
    monkeypatch.setattr(kernels, "backends", {})
    monkeypatch.setattr(triton, "check", lambda: None)
    assert kernels._backend(GPU) is triton and kernels.backends == {"cuda": triton}


def test_where_triton_cannot_work_the_reference_serves_and_one_line_says_so(monkeypatch, caplog):
    def check() -> None:
        raise RuntimeError("Failed to find C compiler.\nAnd more.")

    monkeypatch.setattr(kernels, "backends", {})
    monkeypatch.setattr(triton, "check", check)
    with caplog.at_level(logging.WARNING):
        assert kernels._backend(GPU) is portable and kernels._backend(GPU) is portable
    [record] = caplog.records
    assert "Triton kernels cannot run" in record.getMessage() and "Failed to find C compiler.)" in record.getMessage()


def test_on_a_gpu_of_amds_the_reference_serves_and_one_line_says_so(monkeypatch, caplog):
    """torch calls it "cuda" as well, and Triton has a compiler for it, of whose arithmetic nothing is known."""
    monkeypatch.setattr(kernels, "backends", {})
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with caplog.at_level(logging.WARNING):
        assert kernels._backend(GPU) is portable and kernels._backend(GPU) is portable
    [record] = caplog.records
    assert "Triton kernels cannot run on this GPU (they are for NVIDIA GPUs" in record.getMessage()


def test_without_a_gpu_triton_is_not_imported_and_without_triton_the_reference_serves(tmp_path):
    code = (
        "import sys, torch, types\n"
        "from hvd_dyncomp import kernels\n"
        "kernels.encode_into(torch.empty(258, dtype=torch.uint8), [torch.ones(512)], None, bits=4, block_size=512)\n"
        "assert 'triton' not in sys.modules\n"
        "sys.modules['triton'] = None\n"
        "gpu = types.SimpleNamespace(is_cpu=False, device=torch.device('cuda'))\n"
        "assert kernels._backend(gpu) is kernels._backend(gpu) is kernels.portable\n"
        "sys.modules['triton'] = types.SimpleNamespace(__version__='3.3.1')\n"
        "kernels.backends.clear()\n"
        "assert kernels._backend(gpu) is kernels._backend(gpu) is kernels.portable\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, second = done.stderr.splitlines()
    assert "Triton kernels cannot run" in first and "import of triton halted" in first
    assert "Triton kernels cannot run" in second and "Triton 3.3.1 is older" in second


def said_by(command: list[str], folder: Path) -> list[dict]:
    """What a program prints, that has Triton compile and not interpret."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(folder)
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compiles for these levels and compute capabilities; returns what compiled.py says."""
    folder = tmp_path_factory.mktemp("triton")
    return functools.cache(lambda *arguments: said_by([*COMPILER, *arguments], folder))


SOME = [("0.125,1,4", "90"), ("0.5,2,7", "80")]

# What is not IEEE arithmetic with the default rounding: fused, flushed to zero, or approximate.
INEXACT = re.compile(r"^.*(?:\bfma\.|\bmad\.f|\.ftz|\.approx|div\.full|\.tf32).*$", re.MULTILINE)


@pytest.mark.thorough
@pytest.mark.parametrize("levels, capabilities", SOME)
def test_compiled_arithmetic_is_exact(compiled, levels, capabilities):
    """And a block of the default size is one warp's own: registers suffice, and nothing waits."""
    found = compiled(levels, capabilities)
    assert len({(one["kernel"], one["bits"]) for one in found}) == len(found) >= 8
    for one in found:
        one = {**one}
        text = one.pop("ptx")
        assert not INEXACT.findall(text), one
        assert "ld.global" in text and "bar.sync" not in text, one
        assert one["reg"] <= 240 and one["stack"] <= 16 and one["local"] == 0, one
        assert one["shared"] <= 1024 * (one["bits"] < 0.25), one
        if "residual" in one["kernel"]:
            assert "sqrt.rn.f64" in text and "div.rn.f64" in text, one
        if one["kernel"] == "encode, residual" and float.fromhex(one["weight"]) not in (0.0, 1.0):
            assert one["weight_bits"] in text.lower(), one  # and not what float32 can hold of it


@pytest.mark.thorough
def test_without_being_told_the_compiler_would_fuse(compiled):
    """So that the test above can fail."""
    found = compiled("0.5", "90", "--with-fusion")
    assert any("fma.rn" in one["ptx"] for one in found if one["kernel"] == "encode, residual")


@pytest.mark.thorough
def test_largest_blocks_fit_into_registers(compiled):
    for one in compiled("0.5", "90", "--block-size", str(operations.LARGEST_BLOCK)):
        assert not INEXACT.findall(one["ptx"]) and one["stack"] <= 16 and one["local"] == 0, one["kernel"]


@needs_gpu
def test_a_residual_that_is_nan_stays_so():
    """Of NaN and a number, a GPU's maximum is the number: it would be sent."""
    residual = torch.tensor([float("nan"), *[1.0] * 511]).bfloat16()
    own, message = residual.to(DEVICE), torch.empty(block_bytes(0.5, 512), dtype=torch.uint8, device=DEVICE)
    encode_into(message, [torch.ones(512, device=DEVICE)], own, bits=0.5, block_size=512, dither=0)
    assert same_bits(own.cpu(), residual)


@needs_gpu
def test_nothing_waits_for_the_device_and_the_current_stream_is_used():
    """Values that come late, on a stream of their own, are there when they are read."""
    gradient, out = torch.zeros(512 * 512, device="cuda"), torch.empty(512 * 258, dtype=torch.uint8, device="cuda")
    residual, back = residual_of(512 * 512).cuda(), torch.zeros_like(gradient)
    shape = {"bits": 4, "block_size": 512}
    encode_into(out, [gradient], residual, **shape)  # compiles
    decode_into([back], [out], **shape)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**8)
            gradient.fill_(1.0)
            encode_into(out, [gradient], residual, **shape)
            decode_into([back], [out], **shape)
            finished = torch.cuda.Event()
            finished.record()
            assert not finished.query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert ((back - 1.0).abs() < 0.5).all()
