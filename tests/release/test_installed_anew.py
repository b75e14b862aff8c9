"""What `make dist` makes of a clone, installed into new environments of every Python that is here.

torch comes from where pip is configured to look: gigabytes, where that is the public index.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKS = Path(__file__).with_name("works.py")
COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++")

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def make_dist(tools: Path, clone: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """`make dist` in a new clone, with the tools that are here."""
    run("git", "clone", "-q", ROOT, clone)
    maintain = tools.parent
    command = ["make", "dist", f"MAINTAIN={maintain}", "-o", str(maintain / "stamp")]
    env = os.environ | environment
    return subprocess.run(command, env=env, cwd=clone, capture_output=True, text=True, timeout=1500)


@pytest.fixture(scope="session")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clone's wheel and source distribution, by "whl" and "gz"."""
    clone = tmp_path_factory.mktemp("clone") / "clone"
    done = make_dist(tools, clone)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return {path.suffix[1:]: path for path in (clone / "dist").iterdir()}


def test_there_is_one_of_each(built: dict[str, Path]) -> None:
    machine = os.uname().machine
    assert built.keys() == {"whl", "gz"} and f"-cp311-abi3-manylinux2014_{machine}." in built["whl"].name


def test_without_a_compiler_there_is_none(tools: Path, tmp_path: Path) -> None:
    done = make_dist(tools, tmp_path / "clone", CC="false", CXX="false")
    assert done.returncode != 0 and "no ELF executable or shared library file" in done.stderr
    assert not list((tmp_path / "clone").glob("dist/*"))


def test_containers_would_build_one_for_each_architecture(tools: Path) -> None:
    said = run(tools / "cibuildwheel", "--print-build-identifiers", "--platform", "linux", ROOT)
    assert said.split() == ["cp311-manylinux_x86_64", "cp311-manylinux_aarch64"]


def python(version: str) -> str:
    """A Python of this version, or a skip."""
    found = shutil.which(f"python{version}")
    if not found or subprocess.run([found, "-c", "import ensurepip"], capture_output=True, timeout=60).returncode:
        pytest.skip(f"there is no python{version} in PATH, or it cannot make environments")
    return found


def all_of(said: str) -> str:
    """What works.py says where nothing is refused."""
    assert said.endswith("DDP on 2 ranks, Averager on 2 ranks, FSDP2 on 4 ranks\n"), said
    return said


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_both_work_in_a_new_environment(version: str, built: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(python(version), "-m", "venv", environment)
    mine = environment / "bin" / "python"
    try:
        cpu = [mine, "-m", "pip", "install", "-q", "--no-deps", "-r", ROOT / "tools" / "torch_cpu.txt"]
        subprocess.run(cpu, capture_output=True, timeout=3000)  # a tenth of the size, where pip finds one
        without = {**os.environ, "PATH": str(mine.parent)}
        assert not any(shutil.which(compiler, path=without["PATH"]) for compiler in COMPILERS)
        run(mine, "-m", "pip", "install", "-q", f"{built['whl']}[report]", "psutil", env=without)
        sys.stdout.write(f"wheel: {all_of(run(mine, '-P', WORKS, cwd=tmp_path, env=without))}")
        run(mine, "-m", "pip", "uninstall", "-q", "-y", "hvd_dyncomp")
        run(mine, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", built["gz"])
        sys.stdout.write(f"source distribution: {all_of(run(mine, '-P', WORKS, cwd=tmp_path))}")
    finally:
        shutil.rmtree(environment, ignore_errors=True)
