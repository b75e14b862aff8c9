"""The extension module. Metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel

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


class Wheel(bdist_wheel):
    """A wheel that says by its tag whether it has the extension: pip, and whoever hands it on, know it by that."""

    def get_tag(self) -> tuple[str, str, str]:
        built = all(Path(path).exists() for path in self.get_finalized_command("build_ext").get_outputs())
        return super().get_tag() if built else ("py3", "none", "any")


setup(ext_modules=[native], cmdclass={"bdist_wheel": Wheel})
