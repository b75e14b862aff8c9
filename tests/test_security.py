"""What docs/security.md says of the source and of the set-up, where no linter looks."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = [path for folder in ("hvd_dyncomp", "launch", "tools") for path in (ROOT / folder).rglob("*.py")]
LOCKS = sorted((ROOT / "tools").glob("*.txt"))


def calls() -> Iterator[tuple[str, str, dict[str, str]]]:
    """Every call in the sources: where, what is called, its keyword arguments."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                keywords = {keyword.arg or "**": ast.unparse(keyword.value) for keyword in node.keywords}
                yield f"{path.name}:{node.lineno}", ast.unparse(node.func), keywords


def test_files_are_loaded_without_code() -> None:
    loads = [(where, given) for where, name, given in calls() if name == "torch.load"]
    assert loads
    assert [where for where, given in loads if given.get("weights_only") != "True"] == []


def test_ranks_do_not_send_each_other_pickles() -> None:
    """Horovod's and torch.distributed's collectives of objects pickle; gather_json takes their place."""
    assert [where for where, name, _ in calls() if re.search(r"(allgather|all_gather|broadcast)_object", name)] == []


def pins(lock: Path) -> Iterator[tuple[str, str, str, int]]:
    """Name, version, marker and number of checksums of each entry."""
    for entry in re.split(r"\n(?=[a-z])", lock.read_text(encoding="utf-8")):
        found = re.match(r"([a-z0-9-]+)==(\S+?)(?: ; (.*?))? \\\n", entry)
        if found:
            yield found[1], found[2], found[3] or "", len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", entry))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_entry_has_a_version_and_a_checksum(lock: Path) -> None:
    lines = [line for line in lock.read_text(encoding="utf-8").splitlines() if re.match(r"[^ #]", line)]
    assert len(lines) == len(list(pins(lock))) > 0
    assert all(checksums for *_, checksums in pins(lock))
    assert "://" not in lock.read_text(encoding="utf-8")


def test_what_is_installed_is_what_is_pinned() -> None:
    wanted = {name: version for name, version, marker, _ in pins(ROOT / "tools" / "requirements.txt") if not marker}
    installed = {name: metadata.version(name).partition("+")[0] for name in wanted}
    assert installed == wanted


def test_nothing_that_is_needed_is_missing_from_the_lock() -> None:
    """Set-up installs without looking at dependencies: the lock has to have them."""
    done = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
