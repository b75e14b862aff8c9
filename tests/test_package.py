"""What is tested is what is installed; and what a user without Horovod sees."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import hvd_dyncomp

ROOT = Path(__file__).parents[1]


def test_the_installed_package_is_tested():
    assert Path(hvd_dyncomp.__file__).parent != ROOT / "hvd_dyncomp"


def test_docstring_examples():
    modules = pkgutil.walk_packages(hvd_dyncomp.__path__, "hvd_dyncomp.")
    results = [doctest.testmod(importlib.import_module(module.name)) for module in modules]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 8


def without_horovod(code: str) -> subprocess.CompletedProcess:
    hide = "import sys; sys.modules['horovod'] = None\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, timeout=120)


def test_without_horovod_one_sentence_says_how_to_get_it():
    done = without_horovod("from hvd_dyncomp import DynamicQuantizer")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: hvd_dyncomp needs Horovod built for torch: run 'make setup'")


def test_without_horovod_policies_codec_and_kernels_work():
    done = without_horovod(
        "import warnings; warnings.simplefilter('ignore')\n"
        "import hvd_dyncomp, hvd_dyncomp.codec, torch\n"
        "from hvd_dyncomp.kernels import encode_into\n"
        "assert hvd_dyncomp.Static(4).decide([]).bits == 4\n"
        "encode_into(torch.empty(260, dtype=torch.uint8), [torch.ones(512)], None, bits=4, block_size=512)\n"
    )
    assert done.returncode == 0, done.stderr


def test_imports_go_one_way():
    """The layout of docs/design.md: who may know whom. Leaves (levels, checks, errors) are free to all."""
    allowed = {
        "policies": set(),
        "meter": set(),
        "auto_level": set(),
        "kernels": set(),
        "comm": set(),
        "codec": {"kernels"},
        "buckets": {"codec"},
        "residuals": {"buckets"},
        "binding": {"comm"},
        "controller": {"comm", "policies"},
        "exchange": {"buckets", "codec", "comm", "kernels"},
        "sharded": {"codec", "comm", "exchange", "kernels"},
        "whole": {"codec", "comm", "exchange", "kernels"},
        "handshake": {"binding", "buckets", "codec", "comm", "meter"},
        "introduction": {"comm"},
        "elastic": {"comm", "controller", "quantizer"},
        "step": {"binding", "buckets", "exchange", "handshake", "meter", "sharded", "whole"},
        "plan": {"binding", "buckets", "codec", "introduction", "residuals"},
        "quantizer": {
            *("auto_level", "binding", "comm", "controller", "meter", "plan", "residuals", "step"),
        },
    }
    package = Path(hvd_dyncomp.__file__).parent
    for path in package.rglob("*.py"):
        module = path.relative_to(package).parts[0].removesuffix(".py")
        if module in ("__init__", "levels", "checks", "errors"):
            continue
        used = imported(path.read_text()) - {"levels", "checks", "errors", module}
        assert used <= allowed[module], f"{path.name} imports {sorted(used - allowed[module])}"


def imported(source: str) -> set[str]:
    """The modules of this package that a file imports."""
    found = set()
    for line in source.splitlines():
        if line.startswith("from hvd_dyncomp import "):
            found |= {name.strip() for name in line.split("import ")[1].split(",")}
        elif line.startswith("from hvd_dyncomp."):
            found.add(line.split()[1].split(".")[1])
    return found
