"""The layout of launch/: commands at the door, one folder per subject behind it, and imports that go one way."""

import ast
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"

# Who may know whom.
ROOMS = {
    "common": set(),
    "lab": {"common"},
    "training": {"common"},
    "screening": {"common", "training"},
    "studies": {"common", "costs", "screening", "training"},
    "costs": set(),
    "benchmarks": {"common", "costs", "lab", "training"},
}
DOORS = {"train_resnet": "training", "study": "studies", "bench": "benchmarks", "netlab": "lab"}


def imported(path: Path) -> set[str]:
    """The first names of all that a file imports, inside functions as well."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add((node.module or "").split(".")[0])
        elif isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
    return found


def test_every_file_is_a_door_or_in_a_room() -> None:
    assert {path.stem for path in LAUNCH.glob("*.py")} == DOORS.keys()
    assert {path.parent.name for path in LAUNCH.glob("*/*.py")} == ROOMS.keys()
    assert not list(LAUNCH.glob("*/*/**/*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    for path in (LAUNCH / room).glob("*.py"):
        known = imported(path) & (ROOMS.keys() | DOORS.keys())
        assert known <= {room, *ROOMS[room]}, f"{path} imports {sorted(known - {room, *ROOMS[room]})}"


@pytest.mark.parametrize("door", DOORS)
def test_a_door_only_calls_into_its_room(door: str) -> None:
    path = LAUNCH / f"{door}.py"
    assert imported(path) == {DOORS[door]}
    assert len(path.read_text(encoding="utf-8").splitlines()) < 10


def test_no_name_hides_a_module_of_python() -> None:
    assert not (ROOMS.keys() | DOORS.keys()) & set(sys.stdlib_module_names)
