"""The extension module. Metadata is in setup.cfg."""

from pathlib import Path

from setuptools import Extension, setup

CSRC = Path("hvd_dyncomp/kernels/csrc")

native = Extension(
    "hvd_dyncomp.kernels._native",
    sources=[str(CSRC / name) for name in ("module.cpp", "avx512.cpp", "avx2.cpp", "baseline.cpp")],
    depends=[str(path) for path in sorted(CSRC.glob("*.h"))],
    # Contraction to fused multiply-add would change bits. GCC's own intrinsics are what "maybe uninitialized" is about.
    extra_compile_args=[
        "-std=c++17",
        "-O3",
        "-g0",
        "-fno-fast-math",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fvisibility=hidden",
        "-Wno-psabi",
        "-Wno-maybe-uninitialized",
    ],
    py_limited_api=True,
    optional=True,  # without a compiler the package installs, and the reference kernels serve
)

setup(ext_modules=[native])
