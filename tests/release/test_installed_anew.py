"""Source distribution and wheel: built, checked, and installed into new environments of every Python that is here.

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
# Of the tools that build, the versions of the lock.
LOCKED = os.environ | {"PIP_CONSTRAINT": str(ROOT / "tools" / "requirements.txt")}

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]


def run(*command: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def built(tools: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A clone's wheel and source distribution, by "whl" and "gz"."""
    clone, dist = tmp_path_factory.mktemp("clone") / "clone", tmp_path_factory.mktemp("dist")
    run("git", "clone", "-q", ROOT, clone)
    run(tools / "python", "-m", "build", "--outdir", dist, clone, env=LOCKED)
    return {path.suffix[1:]: path for path in dist.iterdir()}


def test_there_is_one_of_each(built: dict[str, Path]) -> None:
    assert built.keys() == {"whl", "gz"} and "-abi3-linux_" in built["whl"].name


def test_an_index_would_take_them(tools: Path, built: dict[str, Path]) -> None:
    run(tools / "twine", "check", "--strict", *built.values())


def python(version: str) -> str:
    """A Python of this version, or a skip."""
    found = shutil.which(f"python{version}")
    if not found or subprocess.run([found, "-c", "import ensurepip"], capture_output=True, timeout=60).returncode:
        pytest.skip(f"there is no python{version} in PATH, or it cannot make environments")
    return found


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_both_work_in_a_new_environment(version: str, built: dict[str, Path], tmp_path: Path) -> None:
    environment = tmp_path / "environment"
    run(python(version), "-m", "venv", environment)
    mine = environment / "bin" / "python"
    try:
        cpu = [mine, "-m", "pip", "install", "-q", "--no-deps", "-r", ROOT / "tools" / "torch_cpu.txt"]
        subprocess.run(cpu, capture_output=True, timeout=3000)  # a tenth of the size, where pip finds one
        run(mine, "-m", "pip", "install", "-q", f"{built['whl']}[report]")
        sys.stdout.write(f"wheel: {run(mine, '-P', WORKS, cwd=tmp_path)}")
        run(mine, "-m", "pip", "uninstall", "-q", "-y", "hvd_dyncomp")
        run(mine, "-m", "pip", "install", "-q", "--no-deps", "--no-cache-dir", built["gz"])
        sys.stdout.write(f"source distribution: {run(mine, '-P', WORKS, cwd=tmp_path)}")
    finally:
        shutil.rmtree(environment, ignore_errors=True)
