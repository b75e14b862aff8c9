"""Set-up on machines with GPUs, as far as that can be told without one: what is asked for, missing, and passed on.

The scripts run with commands that only pretend; Horovod's build itself is not run.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]

# Answers what the scripts ask Python, and says nothing of Horovod, which loads.
PYTHON = """
case $2 in
pip) shift 2 && exec "${0%python}pip" "$@" ;;
*torch.version.cuda*) echo "$TORCH_CUDA" ;;
*purelib* | *torch.__file__*) echo "$SITE" ;;
*SOABI*) echo torch0-abi-machine ;;
*metadata*) [ -z "$TORCH_CUDA" ] ;;
esac
"""
# Downloads an empty Horovod, and keeps what its build would see.
PIP = """
echo "pip $*" >>"$LOG"
case $1 in
download)
    while [ "$1" != -d ]; do shift; done
    source=$2/horovod-$HOROVOD && mkdir -p "$source/horovod/torch" "$source/horovod/common/ops/cuda"
    for file in CMakeLists.txt horovod/torch/CMakeLists.txt; do echo 'set(CMAKE_CXX_STANDARD 14)' >"$source/$file"; done
    echo 'set(CMAKE_CUDA_STANDARD 11)' >"$source/horovod/common/ops/cuda/CMakeLists.txt"
    echo "    require_list.append('cffi>=1.4.0')" >"$source/setup.py"
    tar -czf "$source.tar.gz" -C "$2" "horovod-$HOROVOD"
    ;;
wheel)
    env >"$LOG.environment"
    while [ "$1" != -w ]; do shift; done
    cat "$3/horovod/common/ops/cuda/CMakeLists.txt" >"$LOG.cuda"
    cat "$3/setup.py" >"$LOG.setup"
    mkdir "$2" && touch "$2/horovod-$HOROVOD-any.whl"
    ;;
esac
"""


class Machine:
    """A clone with an environment, and commands first in PATH: all of them pretend."""

    def __init__(self, root: Path) -> None:
        self.clone, self.commands, self.site, self.cuda = root / "clone", root / "bin", root / "site", root / "cuda"
        self.log = root / "log"
        shutil.copytree(ROOT / "tools", self.clone / "tools")
        for name in ("mpirun", "mpicxx", "c++"):
            self.command(self.commands / name, "echo 'mpirun (Open MPI) 4.1.4'")
        self.command(self.commands / "cmake", "echo 'cmake version 3.25.1'")
        self.command(self.commands / "apt-get", "exit 0")
        self.gpus("exit 9")
        self.command(self.clone / ".venv" / "bin" / "python", PYTHON)
        self.command(self.clone / ".venv" / "bin" / "pip", PIP)
        self.site.mkdir()
        [horovod] = [line.split()[0] for line in (ROOT / "tools" / "horovod.txt").open() if line.startswith("horovod")]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "CUDA_"))}
        self.environment = kept | {
            "PATH": f"{self.commands}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "XDG_CACHE_HOME": str(root / "cache"),
            "HOROVOD_CUDA_HOME": str(self.cuda),  # so that what this machine may have is not found
            "TORCH_CUDA": "13.0",
            "SITE": str(self.site),
            "LOG": str(self.log),
            "HOROVOD": horovod.partition("==")[2],
        }

    @staticmethod
    def command(path: Path, script: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(0o755)

    def gpus(self, script: str) -> None:
        self.command(self.commands / "nvidia-smi", script)

    def toolkit(self, release: str = "13.0", without: str = "") -> None:
        self.command(self.cuda / "bin" / "nvcc", f"echo 'Cuda compilation tools, release {release}, V{release}.1'")
        for name in {"include/cuda_runtime.h", "lib64/libcudart.so"} - {without}:
            (self.cuda / name).parent.mkdir(exist_ok=True)
            (self.cuda / name).touch()

    def nccl(self, folder: str = "site/nvidia/nccl", library: str = "libnccl.so.2") -> Path:
        home = self.site.parent / folder
        (home / "include").mkdir(parents=True)
        (home / "include" / "nccl.h").write_text("#define NCCL_MAJOR 2\n#define NCCL_MINOR 29\n#define NCCL_PATCH 7\n")
        (home / "lib").mkdir()
        (home / "lib" / library).touch()
        return home

    def run(self, *command: str, **variables: str) -> str:
        """What it printed. An error is a status of 1 and a last message of the script's."""
        environment = self.environment | variables
        done = subprocess.run(
            command, cwd=self.clone, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        self.failed = done.returncode != 0
        return done.stdout + done.stderr

    def build(self, **variables: str) -> str:
        return self.run("tools/build_horovod.sh", ".venv", **variables)

    def built_with(self) -> dict[str, str]:
        """The environment of Horovod's build."""
        lines = Path(f"{self.log}.environment").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def logged(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


NCCL = {"HOROVOD_GPU_OPERATIONS": "NCCL"}


def test_without_a_wish_horovod_is_built_for_cpus(machine):
    said = machine.build()
    assert not machine.failed and said.endswith("with MPI and Gloo is installed\n")
    assert not {"HOROVOD_GPU", "HOROVOD_GPU_OPERATIONS", "CUDA_HOME", "HOROVOD_NCCL_HOME"} & machine.built_with().keys()
    assert re.search(r"-mpi4\.1\.4-gpunone-[0-9a-f]{8}/horovod", machine.logged())


def test_horovod_without_mpi(machine):
    machine.command(machine.commands / "mpirun", "exit 127")
    said = machine.build(HOROVOD_WITHOUT_MPI="1")
    assert not machine.failed and said.endswith("with Gloo alone is installed\n"), said
    assert "HOROVOD_WITH_MPI" not in machine.built_with() and machine.built_with()["HOROVOD_WITHOUT_MPI"] == "1"
    assert re.search(r"-mpinone-gpunone-[0-9a-f]{8}/horovod", machine.logged())
    said = machine.build(HOROVOD_WITHOUT_MPI="yes")
    assert machine.failed and "HOROVOD_WITHOUT_MPI must be 1 or not be set, got 'yes'" in said


def test_nccl_of_torch_is_what_horovod_is_linked_with(machine):
    machine.toolkit()
    home = machine.nccl()
    said = machine.build(**NCCL)
    assert not machine.failed and said.endswith("with MPI and Gloo, and NCCL for GPU tensors is installed\n"), said
    built = machine.built_with()
    assert {name: value for name, value in built.items() if name.startswith(("HOROVOD_G", "HOROVOD_N", "CUDA"))} == {
        "HOROVOD_GPU": "CUDA",
        "HOROVOD_GPU_OPERATIONS": "NCCL",
        "HOROVOD_NCCL_HOME": str(home),
        "HOROVOD_NCCL_LINK": "SHARED",
        "CUDA_HOME": str(machine.cuda),
    }
    assert built["HOROVOD_CUDA_HOME"] == str(machine.cuda) and built["PATH"].startswith(
        f".venv/bin:{machine.cuda}/bin:"
    )
    assert (home / "lib" / "libnccl.so").resolve() == home / "lib" / "libnccl.so.2"
    assert Path(f"{machine.log}.cuda").read_text() == "set(CMAKE_CUDA_STANDARD 17)\n"
    assert re.search(r"-gpuNCCL2.29.7-cuda13.0-[0-9a-f]{8}/horovod", machine.logged())


@pytest.mark.parametrize(
    "variables, says",
    [
        ({"HOROVOD_GPU_OPERATIONS": "MPI"}, "HOROVOD_GPU_OPERATIONS must be NCCL, got 'MPI'"),
        ({"HOROVOD_GPU": "ROCM"}, "HOROVOD_GPU must be CUDA, got 'ROCM'"),
        ({"HOROVOD_GPU_ALLREDUCE": "NCCL"}, "HOROVOD_GPU_ALLREDUCE is not supported"),
        (NCCL | {"TORCH_CUDA": ""}, "is a CPU build, and Horovod for GPUs needs one for CUDA"),
    ],
)
def test_what_cannot_be_is_an_error_before_anything_is_downloaded(machine, variables, says):
    machine.toolkit()
    machine.nccl()
    said = machine.build(**variables)
    assert machine.failed and said.startswith("build_horovod: ") and says in said
    assert machine.logged() == ""


@pytest.mark.parametrize("wish", [NCCL, {"HOROVOD_GPU": "CUDA"}])
@pytest.mark.parametrize("without", ["nvcc", "include/cuda_runtime.h", "lib64/libcudart.so", "CUDA 13"])
def test_what_lacks_of_the_toolkit_is_named_with_the_package_that_has_it(machine, wish, without):
    machine.nccl()
    if without != "nvcc":
        machine.toolkit("11.8" if without == "CUDA 13" else "13.2", without)
    said = machine.build(**wish)
    assert machine.failed and f"Missing: {Path(without).name}" in said and "NVIDIA's package cuda-toolkit-13-0" in said
    assert machine.logged() == ""


def set_up(machine: Machine, **variables: str) -> tuple[str, list[str]]:
    """What tools/setup.sh says, and what pip was asked for; Horovod's build says what is wished of it."""
    machine.command(
        machine.clone / "tools" / "build_horovod.sh", 'echo "wish: ${HOROVOD_GPU:-}, ${HOROVOD_GPU_OPERATIONS:-}"'
    )
    said = machine.run("tools/setup.sh", **variables)
    asked = [line.split()[-1] for line in machine.logged().splitlines()]
    return said, asked


def test_a_gpu_without_a_toolkit_is_left_alone_aloud(machine):
    machine.gpus("echo 'GPU 0: Pretender (UUID: GPU-0)'")
    said, asked = set_up(machine)
    assert not machine.failed and "wish: , \n" in said and asked[0] == "tools/torch_cpu.txt"
    assert (
        "setup: there is a GPU, but all is set up for CPUs: Horovod for GPUs needs CUDA's toolkit. Missing: nvcc"
        in said
    )


@pytest.mark.parametrize("torch_cuda", ["", "13.0"])
def test_a_gpu_with_a_toolkit_gets_the_cuda_build_and_nccl(machine, torch_cuda):
    machine.gpus("echo 'GPU 0: Pretender (UUID: GPU-0)'")
    machine.toolkit()
    machine.nccl()
    said, asked = set_up(machine, TORCH_CUDA=torch_cuda)
    assert not machine.failed and "wish: CUDA, NCCL\n" in said
    assert "there is a GPU; its tensors' collectives are NCCL's, of " in said
    # "torch==2.13.0" is there already, to pip, if a CPU build of it is.
    assert asked == ([] if torch_cuda else ["torch"]) + ["tools/requirements.txt"]
