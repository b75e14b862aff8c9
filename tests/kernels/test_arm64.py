"""The native kernels on arm64, under an emulator: the reference's bits, and the golden bytes of the wire format.

Debian has what it takes: g++-aarch64-linux-gnu and qemu-user. Set-up does not install them.
"""

import shutil
import subprocess
from itertools import product
from pathlib import Path

import pytest
import setuptools  # noqa: F401  (it brings distutils)
import torch
from emulated import running

from hvd_dyncomp import LEVELS
from hvd_dyncomp.kernels import block_bytes, decode_into, encode_into, reduce_into, reference

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "exchange" / "fixtures" / "wire_v9.txt"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"

each_level = pytest.mark.parametrize("bits", [bits for bits in LEVELS if bits < 32])
BLOCKS = 3
SHAPES = [(64, 0), (512, 100), (4096, 4097)]  # values of a block, and how many of BLOCKS of them are padding
SPECIAL = torch.tensor([0.0, -0.0, 1e-45, -1e-40, 2.0**-126, 2.0**-100, 3e38, -3.4e38])


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    """The kernels as setup.py has them compiled, but for arm64 and into a program."""
    import distutils.core

    for tool in (COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}")
    [extension] = distutils.core.run_setup(str(ROOT / "setup.py"), stop_after="init").ext_modules
    built = tmp_path_factory.mktemp("arm64") / "emulated"
    sources = [ROOT / name for name in extension.sources if Path(name).name != "module.cpp"]
    sources.append(ROOT / "tests" / "kernels" / "emulated.cpp")
    command = [COMPILER, *extension.extra_compile_args, "-static", f"-I{sources[0].parent}", *sources, "-o", built]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return built


@pytest.fixture
def arm64(program, monkeypatch):
    """Has the emulated kernels serve."""
    with running([EMULATOR, program]) as emulated:
        monkeypatch.setattr("hvd_dyncomp.kernels.backends", {"cpu": emulated})
        yield


def gradients(kind: str, block_size: int, seed: int) -> torch.Tensor:
    """(BLOCKS * block_size,) float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(BLOCKS, block_size, generator=generator)
    x *= torch.tensor([1.0, 1e-20, 1e15]).view(-1, 1)
    if kind == "ties":  # at halves of a scale of 5 and more bits
        x = torch.randint(-120, 121, x.shape, generator=generator).float() / 8
    elif kind == "special":
        x[:, ::5] = SPECIAL[torch.randint(0, len(SPECIAL), x[:, ::5].shape, generator=generator)]
        x[1] = 0.0
    elif kind == "broken":
        x[0, 3], x[1, 5], x[2, 7] = torch.nan, torch.inf, -torch.inf
    return x.view(-1)


def residuals(kind: str, gradient: torch.Tensor, bits: float) -> torch.Tensor | None:
    if kind == "none":
        return None
    shuffled = gradient.nan_to_num().clamp(-1e30, 1e30).view(BLOCKS, -1).flip(1).reshape(-1)
    return (
        shuffled * reference.residual_bound(bits) * {"small": 0.1, "at its bound": 1 - 2.0**-20, "beyond": 1.01}[kind]
    )


def any_bytes(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """What another machine may send."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """A NaN equals a NaN, as their payloads are the processor's; a positive zero does not equal a negative one."""
    nan = a.isnan()
    return torch.equal(nan, b.isnan()) and torch.equal(a[~nan].view(torch.int32), b[~nan].view(torch.int32))


CASES = list(product(["ordinary", "ties", "special", "broken"], ["none", "small", "at its bound", "beyond"], SHAPES))


@pytest.mark.thorough
@pytest.mark.usefixtures("arm64")
@each_level
def test_every_operation_has_the_references_bits(bits):
    for seed, case in enumerate(CASES):
        kind, owed, (block_size, missing) = case
        form = {"bits": bits, "block_size": block_size}
        gradient = gradients(kind, block_size, seed)
        real = gradient.numel() - missing
        expected_residual = residuals(owed, gradient, bits)
        residual = None if expected_residual is None else expected_residual.clone()

        payload = reference.encode(gradient, expected_residual, real=real, **form).view(-1)
        out = torch.empty_like(payload)
        pieces = [torch.ones(7), *gradient[:real].split(1000)]
        encode_into(out, pieces, residual, first=7, **form)
        assert torch.equal(out, payload), case
        assert residual is None or same_bits(residual, expected_residual), case

        other = any_bytes((BLOCKS, block_bytes(bits, block_size)), seed)
        versions = [payload.view_as(other), other, payload.view_as(other)]
        into = [torch.full_like(piece, 7.0) for piece in pieces]
        decode_into(into, [version.view(-1) for version in versions], first=7, factor=1 / 3, **form)
        expected = reference.decode_sum(versions, factor=1 / 3, **form)[:real]
        assert (into[0] == 7.0).all() and same_bits(torch.cat(into[1:]), expected), case

        total = reference.decode_sum(versions, **form)
        reduced = reference.encode(total, expected_residual, real=real, **form).view(-1)
        reduce_into(out, [version.view(-1) for version in versions], residual, real=real, **form)
        assert torch.equal(out, reduced), case
        assert residual is None or same_bits(residual, expected_residual), case


@pytest.mark.thorough
@pytest.mark.usefixtures("arm64")
def test_the_golden_bytes():
    """Those of tests/exchange/test_codec.py."""
    header, *lines = GOLDEN.read_text().splitlines()
    assert header.startswith("header ") and len(lines) == 2 * (len(LEVELS) - 1)
    for line in lines:
        bits, real, expected = line.split()
        level = float(bits) if float(bits) < 1 else int(bits)
        out = torch.empty(block_bytes(level, 64), dtype=torch.uint8)
        encode_into(out, [((torch.arange(64) - 31.5) / 8)[: int(real)]], None, bits=level, block_size=64)
        assert bytes(out.numpy()).hex() == expected, line
