"""What is tested is what is installed; and what a user without Horovod sees."""

import ast
import doctest
import importlib.util
import pkgutil
import subprocess
import sys
from pathlib import Path

import hvd_dyncomp

ROOT = Path(__file__).parents[1]


def test_the_installed_package_is_tested():
    assert Path(hvd_dyncomp.__file__).parent != ROOT / "hvd_dyncomp"


def test_docstring_examples():
    names = [module.name for module in pkgutil.walk_packages(hvd_dyncomp.__path__, "hvd_dyncomp.")]
    if importlib.util.find_spec("triton") is None:
        names = [name for name in names if not name.startswith("hvd_dyncomp.kernels.triton")]
    for name in [name for name in names if name.startswith("hvd_dyncomp.integrations.")]:
        if importlib.util.find_spec(name.split(".")[-1]) is None:  # the framework itself
            names.remove(name)
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 8


def without_horovod(code: str) -> subprocess.CompletedProcess:
    hide = "import sys; sys.modules['horovod'] = None\n"
    return subprocess.run([sys.executable, "-c", hide + code], capture_output=True, text=True, timeout=120)


def test_without_horovod_one_sentence_says_how_to_get_it():
    done = without_horovod("from hvd_dyncomp import Controller; from hvd_dyncomp import DynamicQuantizer")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: hvd_dyncomp needs Horovod built for torch: run 'make setup'")


def test_without_horovod_policies_codec_and_kernels_work():
    done = without_horovod(
        "import warnings; warnings.simplefilter('error')\n"
        "import hvd_dyncomp, hvd_dyncomp.exchange.wire, torch\n"
        "from hvd_dyncomp.kernels import encode_into\n"
        "assert hvd_dyncomp.Static(4).decide([]).bits == 4\n"
        "encode_into(torch.empty(258, dtype=torch.uint8), [torch.ones(512)], None, bits=4, block_size=512)\n"
    )
    assert done.returncode == 0, done.stderr


def test_without_horovod_an_averager_works():
    done = without_horovod(
        "import hvd_dyncomp, torch\n"
        "from hvd_dyncomp.simulate import World\n"
        "tensors = [torch.zeros(2000), torch.ones(2000)]\n"
        "def program(transport):\n"
        "    averager = hvd_dyncomp.Averager([('a', torch.zeros(2000))], 16, transport=transport)\n"
        "    averager.mean_([tensors[transport.rank]])\n"
        "World(2).run(program)\n"
        "assert torch.equal(*tensors) and abs(tensors[0][0] - 0.5) < 1e-6\n"
        "alone = hvd_dyncomp.Averager([('a', torch.zeros(2000))], 16)\n"
        "alone.mean_([tensors[0]])\n"
        "assert abs(tensors[0][0] - 0.5) < 1e-6 and alone.controller.step({'a': 1.0}) == 16\n"
        "import os; os.environ['OMPI_COMM_WORLD_SIZE'] = '2'\n"
        "hvd_dyncomp.Averager([('a', torch.zeros(2000))], 16)\n"
    )
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("ValueError: nothing connects the ranks: call hvd.init()")


def test_an_averager_is_imported_when_it_is_used():
    done = without_horovod(
        "import sys, hvd_dyncomp\n"
        "assert {'Averager', 'AllRanks', 'ddp', 'Controller'} <= set(dir(hvd_dyncomp))\n"
        "assert not {'hvd_dyncomp.averaging', 'hvd_dyncomp.sessions'} & set(sys.modules)\n"
        "from hvd_dyncomp import Averager\n"
    )
    assert done.returncode == 0, done.stderr


def test_editors_and_type_checkers_know_what_is_imported_late():
    """Otherwise `hvd_dyncomp.ddp.compress` is Any to them, and its options are neither completed nor checked."""
    tree = ast.parse(Path(hvd_dyncomp.__file__).read_text())
    [declared] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {alias.name for node in declared.body for alias in node.names}
    assert names == {*hvd_dyncomp._LATE, *hvd_dyncomp._MODULES}


def test_without_horovod_a_controller_works_among_ranks_that_do_not_need_it():
    done = without_horovod(
        "import warnings; warnings.simplefilter('ignore')\n"
        "from hvd_dyncomp import Controller\n"
        "from hvd_dyncomp.simulate import World\n"
        "assert World(2).run(lambda transport: Controller(4, transport=transport).step({'a': 1.0})) == [4, 4]\n"
        "controller = Controller()\n"
        "assert controller.step({'val_accuracy': 1.0, 'train_loss': 1.0}) == 16\n"
        "import os; os.environ['WORLD_SIZE'] = '2'\n"
        "controller.step({'val_accuracy': 1.0, 'train_loss': 1.0})\n"
    )
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1].startswith("ValueError: nothing connects the ranks: call hvd.init()")


def test_without_lightning_one_sentence_says_how_to_get_it():
    hide = "sys.modules['lightning'] = sys.modules['lightning.pytorch'] = sys.modules['pytorch_lightning'] = None\n"
    done = without_horovod(hide + "import hvd_dyncomp.integrations.lightning")
    last = done.stderr.strip().splitlines()[-1]
    assert last == "ImportError: hvd_dyncomp.integrations.lightning needs Lightning: run 'pip install lightning'"


LEAVES = {"levels", "checks", "errors", "torch_names"}  # free to all
ROOMS = {
    "policies": set(),
    "meter": set(),
    "kernels": set(),
    "transport": set(),
    "momentum": set(),
    "ranges": set(),
    "replicas": {"transport"},
    "exchange": {"kernels", "meter", "ranges", "replicas", "transport"},
    "autograd": set(),
    "wrappers": set(),
    "controller": {"policies", "transport"},
    "sessions": {"controller", "exchange", "meter", "momentum", "policies", "replicas", "transport"},
    "diagnostics": {"exchange", "sessions"},
    "averaging": {"controller", "exchange", "policies", "sessions", "transport"},
    "ddp": {"autograd", "averaging", "controller", "exchange", "policies", "sessions", "transport", "wrappers"},
    "fsdp": {
        *("autograd", "controller", "exchange", "meter", "policies", "replicas", "sessions", "transport", "wrappers"),
    },
    "on_horovod": {"controller", "exchange", "momentum", "policies", "sessions", "transport"},
    "integrations": {"controller", "ddp", "policies", "replicas", "sessions", "transport"},
    "simulate": {"transport"},
    "commands": {"autograd", "controller", "ddp", "exchange", "kernels", "meter", "on_horovod", "transport"},
    "__main__": {"commands"},
}
SESSIONS = {
    "advice": set(),
    "options": set(),
    "agreement": set(),
    "session": {"advice"},
    "all_ranks": {"session"},
    "per_rank": {"agreement", "all_ranks", "session"},
}
EXCHANGE = {
    "wire": set(),
    "source": set(),
    "settings": set(),
    "streams": set(),
    "task": set(),
    "handshake": {"task", "wire"},
    "coding": set(),
    "slots": {"coding", "settings"},
    "topology": {"coding", "wire"},
    "residuals": {"slots", "streams"},
    "buckets": {"coding", "residuals", "settings", "slots", "streams", "topology"},
    "memory": set(),
    "messages": {"buckets", "streams", "wire"},
    "residual_state": {"buckets", "slots"},
    "sums": {"source", "streams", "task"},
    "plan": {
        *("buckets", "coding", "handshake", "residual_state", "settings", "source", "task", "topology", "wire"),
    },
    "recipes": {"coding", "messages", "task", "topology", "wire"},
    "bucket_exchange": {"buckets", "memory", "messages", "recipes", "slots", "source", "task"},
    "step": {
        *("buckets", "memory", "bucket_exchange", "plan", "settings", "slots", "streams", "sums"),
        *("task", "wire"),
    },
}
ON_HOROVOD = {
    "horovod_optimizer": set(),
    "gradients": {"horovod_optimizer"},
    "session": {"gradients", "horovod_optimizer"},
    "quantizer": {"horovod_optimizer", "session"},
    "elastic": {"quantizer"},
}
FSDP = {
    "layout": set(),
    "source": {"layout"},
    "unit_steps": {"layout"},
    "quantizer": {"source", "unit_steps"},
    "backend": {"quantizer"},
    "entry": {"backend", "quantizer"},
}
PROBE = {
    "findings": {"methods"},
    "methods": set(),
    "tensors": set(),
    "turns": {"methods"},
    "command": {"findings", "methods", "tensors", "turns"},
}
REPORT = {
    "runs": set(),
    "tables": {"runs"},
    "figures": {"runs", "tables"},
    "page": {"figures", "runs", "tables"},
    "command": {"page", "runs"},
}
RUN = {
    "comparison": set(),
    "passes": set(),
    "program": set(),
    "leaving": set(),
    "models": {"comparison", "leaving", "passes"},
    "patches": {"models"},
    "command": {"comparison", "models", "patches", "program"},
}
KERNELS = {
    "scales": set(),
    "packing": set(),
    "sparse": {"scales"},
    "reference": {"packing", "scales", "sparse"},
    "portable": {"reference", "scales"},
    "native": {"_native", "reference"},
    "triton": {"portable", "reference", "scales", "sparse", "triton"},
}
TRITON = {
    "form": set(),
    "exact": set(),
    "memory": set(),
    "payload": {"exact"},
    "blocks": {"exact", "payload"},
    "tiles": {"blocks", "exact", "memory", "payload"},
    "operations": {"form", "tiles"},
}
INSIDE = {
    ("exchange",): EXCHANGE,
    ("on_horovod",): ON_HOROVOD,
    ("fsdp",): FSDP,
    ("sessions",): SESSIONS,
    ("commands", "probe"): PROBE,
    ("commands", "report"): REPORT,
    ("commands", "run"): RUN,
    ("kernels",): KERNELS,
    ("kernels", "triton"): TRITON,
}


def test_imports_go_one_way():
    """The layout of docs/dev/design.md: who may know whom, among folders and, in some of them, among files."""
    package = Path(hvd_dyncomp.__file__).parent
    seen = set()
    for path in package.rglob("*.py"):
        room, *inside = path.relative_to(package).with_suffix("").parts
        if room == "__init__" or room in LEAVES:
            continue
        used = imported(path.read_text())
        rooms = {other[0] for other in used} - LEAVES - {room}
        assert rooms <= ROOMS[room], f"{path} imports {sorted(rooms - ROOMS[room])}"
        seen.add(room)
        for depth in range(1, len(inside) + 1):
            folder, name = (room, *inside)[:depth], inside[depth - 1]
            if folder in INSIDE and name != "__init__":
                files = {other[depth] for other in used if other[:depth] == folder}
                allowed = INSIDE[folder][name]
                assert files <= allowed, f"{path} imports {sorted(files - allowed)}"
                seen.add((*folder, name))
        if room == "commands":
            others = {other[1] for other in used if other[0] == room} - {*inside[:1], "ranks"}
            assert not others, f"{path} imports another command: {sorted(others)}"
    files = {(*folder, file) for folder, table in INSIDE.items() for file in table}
    assert seen == {*ROOMS, *files}, "a table has what is not there any more"


def test_the_exchange_does_not_grow_back():
    """Twice it was made smaller, and grew again. Whoever needs more room first looks for what can go."""
    files = (Path(hvd_dyncomp.__file__).parent / "exchange").glob("*.py")
    assert sum(len(path.read_text().splitlines()) for path in files) <= 2700


def imported(source: str) -> set[tuple[str, ...]]:
    """The files and folders of this package that a file imports: ("kernels", ...), ("exchange", "codec") ..."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "hvd_dyncomp":
            found |= {(*node.module.split(".")[1:], alias.name) for alias in node.names}
    return found
