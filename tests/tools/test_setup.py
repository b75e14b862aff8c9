"""What tools/setup.sh asks of the system, and `import torchvision` beside a CPU build of torch, which it adds."""

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]


def fresh(code: str, **options: str) -> str:
    """What a new process prints. `path`: a folder whose modules come before what is installed."""
    paths = f"import sys; sys.path.insert(0, {options['path']!r})\n" if options else ""
    done = subprocess.run([sys.executable, "-P", "-c", paths + code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_imports_of_horovods_examples() -> None:
    code = (
        "from torchvision import datasets, transforms, models\n"
        "import horovod.torch as hvd\n"
        "prepare = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))])\n"
        "images = datasets.FakeData(2, (1, 28, 28), transform=transforms.Grayscale())\n"
        "print(prepare(images[0][0]).shape[1], datasets.MNIST.__name__)"
    )
    assert fresh(code) == "28 MNIST"


def names(script: str) -> list[str]:
    """Packages of the lock that set-up installs into .venv-ddp, by its lines that select them."""
    lines = (ROOT / "tools" / "setup.sh").read_text(encoding="utf-8")
    [selecting] = re.findall(r"^without_horovod=.*?^}$", lines, flags=re.M | re.S)
    done = subprocess.run(
        ["bash", "-c", f"venv=.venv-ddp\n{selecting}\n{script}"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    return re.findall(r"^([\w-]+)==", done.stdout, flags=re.M)


def needed(package: str) -> set[str]:
    """It and all that it requires here, in the lock's spelling."""
    found, asked = set(), [package]
    while asked:
        name = canonicalize_name(asked.pop())
        if name not in found:
            found.add(name)
            requirements = map(Requirement, metadata.requires(name) or ())
            asked += [each.name for each in requirements if not each.marker or each.marker.evaluate({"extra": ""})]
    return found


def test_the_environment_for_torchrun_has_all_that_torch_needs_and_no_more() -> None:
    beside = names('lock_without "$for_gpus"')
    cpu = {name for name in needed("torch") | {"numpy", "setuptools"} if not re.match("cuda-|nvidia-|triton", name)}
    # ResNet-18 of docs/quickstart.md is torchvision's.
    assert {*beside, "torch"} == cpu | {"scikit-learn", "tqdm", "torchvision", "pillow"}
    lock = (ROOT / "tools" / "requirements.txt").read_text(encoding="utf-8")
    gpus = re.findall(r"^((?:cuda-|nvidia-)[\w-]+|triton|torch)==", lock, flags=re.M)
    assert {*names("lock_without '$'")} == {*beside, *gpus}


def test_python_starts_without_torch() -> None:
    assert fresh("import sys; print({'torch', 'torchvision'} & sys.modules.keys())") == "set()"
    code = "import sys, importlib.util; importlib.util.find_spec('torchvision'); print('torch' in sys.modules)"
    assert fresh(code) == "False"


# Whether torchvision's own operators have loaded, torch's version of CUDA, whether they are declared.
@pytest.mark.parametrize(("load", "cuda", "declared"), [(False, None, True), (True, None, False), (False, "13", False)])
def test_operators_are_declared_only_where_they_lack(tmp_path: Path, load: bool, cuda: str, declared: bool) -> None:
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("from . import extension\n")
    (tmp_path / "torchvision" / "extension.py").write_text(f"def _has_ops():\n    return {load}\n")
    code = (
        f"import torch; torch.version.cuda = {cuda!r}\n"
        "import torchvision\n"
        "print([hasattr(torch.ops.torchvision, name) for name in ('nms', 'qnms')])"
    )
    assert fresh(code, path=str(tmp_path)) == str([declared, declared])


COMMANDS = {"mpirun": "openmpi-bin", "mpicxx": "libopenmpi-dev", "c++": "g++", "cmake": "cmake", "make": "make"}


def asked_for(folder: Path, commands: dict[str, str]) -> str:
    """What set-up says to install where these commands are all that there is, beside Python."""
    for command in ("bash", "dirname"):
        (folder / command).symlink_to(str(shutil.which(command)))
    (folder / "python3").symlink_to(sys.executable)
    for command, does in {"id": "echo 1000", **commands}.items():
        (folder / command).write_text(f"#!/bin/sh\n{does}\n")
        (folder / command).chmod(0o755)
    command = [str(folder / "bash"), str(ROOT / "tools" / "setup.sh")]
    done = subprocess.run(command, env={"PATH": str(folder)}, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.parametrize("missing", COMMANDS)
def test_what_the_build_cannot_do_without_is_asked_for(tmp_path: Path, missing: str) -> None:
    said = asked_for(tmp_path, dict.fromkeys(COMMANDS.keys() - {missing}, "exit 0"))
    assert f"apt-get install -y {COMMANDS[missing]} " in said


def test_a_wheel_without_the_extension_is_tagged_as_one_for_every_platform(tmp_path: Path) -> None:
    """Or it would pass for the one with it, as pip keeps and finds wheels by their tags."""
    for name in ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "hvd_dyncomp", tmp_path / "hvd_dyncomp")
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "."]
    environment = os.environ | {"CC": "false", "CXX": "false"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
