"""What a wheel and a source distribution hold, and what they ask for; tests/release/ builds and installs both."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "launch"
DISTRIBUTION = metadata.distribution("hvd_dyncomp")
# What a distribution is built from; the rest of the repository is for who works on it.
BESIDE = {"CITATION.cff", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg", "setup.py"}


def sources(*patterns: str) -> set[str]:
    """Files of the package, as they are named from the top of the repository."""
    found = {path for pattern in patterns for path in (ROOT / "hvd_dyncomp").rglob(pattern)}
    return {str(path.relative_to(ROOT)) for path in found if path.is_file() and "__pycache__" not in path.parts}


def test_the_wheel_holds_the_package_and_nothing_else() -> None:
    """pip has built what is installed here."""
    names = {str(path) for path in DISTRIBUTION.files or () if "__pycache__" not in path.parts}
    inside = {name for name in names if not re.match(r"hvd_dyncomp-[^/]*\.dist-info/|.*/bin/hvd-dyncomp$", name)}
    extension = {name for name in inside if Path(name).stem == "_native.abi3"}
    assert len(extension) == 1, "the kernels are not built, or for one version of Python only"
    assert inside - extension == sources("*.py", "py.typed", "page.html")
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_one_wheel_serves_all_pythons() -> None:
    assert re.search(r"^Tag: cp311-abi3-", DISTRIBUTION.read_text("WHEEL") or "", flags=re.MULTILINE)
    assert DISTRIBUTION.metadata["Requires-Python"] == ">=3.11"


@pytest.mark.thorough
def test_the_source_distribution_holds_what_a_build_needs(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for folder in ("hvd_dyncomp", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in BESIDE:
        shutil.copy(ROOT / name, copy)
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    command = [sys.executable, "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        names = {member.name.partition("/")[2] for member in archive if member.isfile()}
    generated = {name for name in names if name == "PKG-INFO" or name.startswith("hvd_dyncomp.egg-info/")}
    assert names - generated == sources("*") | BESIDE


def requirements(extra: str = "") -> set[str]:
    """The names of what an extra asks for; without one, of what all users need."""
    found = set()
    for line in DISTRIBUTION.requires or ():
        name = re.match(r"[\w.-]+", line)
        if (re.findall(r"extra == [\"'](.*?)[\"']", line) or [""])[0] == extra:
            found.add(name[0].lower() if name else line)
    return found


def modules(folder: Path) -> set[str]:
    """All that the files of a folder import, wherever in them, or look for by find_spec."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add(node.module or "")
            elif isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.util.find_spec":
                found.add(ast.literal_eval(node.args[0]))
    return found


def needed(folder: Path, own: set[str]) -> set[str]:
    """The distributions that these imports come from, but for Horovod, which nobody can ask pip for, and `own`."""
    top = {name.partition(".")[0] for name in modules(folder)} - own - sys.stdlib_module_names - {"horovod"}
    from_where = metadata.packages_distributions()
    assert top <= from_where.keys(), f"not installed: {sorted(top - from_where.keys())}"
    return {from_where[name][0].lower() for name in top} - {"hvd_dyncomp"}


def test_the_library_asks_for_what_it_imports() -> None:
    # numpy is in use without an import, by Tensor.numpy, and torch does not ask for it. Triton comes with torch. Each
    # framework that somebody has is imported by its own file only (`integrations`). The probe does without tqdm.
    own = {"triton", "transformers", "matplotlib", "jinja2", "tqdm"}
    assert requirements() == needed(ROOT / "hvd_dyncomp", own) | {"numpy"}
    files = (ROOT / "hvd_dyncomp").rglob("*.py")
    assert {path.parent.name for path in files if "transformers import" in path.read_text()} == {"integrations"}


def test_the_report_extra_is_what_the_page_imports() -> None:
    """Only the page does: a library for training has no need of plots."""
    report = ROOT / "hvd_dyncomp" / "commands" / "report"
    assert requirements("report") == needed(report, {"torch"}) == {"matplotlib", "jinja2"}
    drawing = [path.name for path in (ROOT / "hvd_dyncomp").rglob("*.py") if "matplotlib import" in path.read_text()]
    assert drawing == ["figures.py"]


def test_the_launch_extra_is_what_launch_imports() -> None:
    own = {path.stem for path in LAUNCH.iterdir()}
    assert requirements("launch") == needed(LAUNCH, own) - requirements()


def test_tensorboard_is_an_extra_of_its_own() -> None:
    assert "torch.utils.tensorboard" in modules(LAUNCH)
    assert requirements("tensorboard") == {"tensorboard"}


@pytest.mark.parametrize("extra", ["launch", "report", "tensorboard", "test"])
def test_the_lock_has_all_extras(extra: str) -> None:
    locked = set(re.findall(r"^([\w.-]+)==", (ROOT / "tools" / "requirements.txt").read_text(), flags=re.MULTILINE))
    assert requirements(extra) and requirements(extra) <= locked
