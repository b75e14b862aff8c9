"""The layout of launch/: one folder per command, the trainer beside its own, and imports that go one way."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"

# Who may know whom.
ROOMS = {
    "common": set(),
    "netlab": {"common"},
    "train": {"common"},
    "study": {"common", "train"},
    "bench": {"common", "netlab", "train"},
}
PROGRAM = "train_resnet"
COMMANDS = ("study", "bench", "netlab")


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


def test_every_file_is_the_trainer_or_in_a_room() -> None:
    assert [path.stem for path in LAUNCH.glob("*.py")] == [PROGRAM]
    assert {path.parent.name for path in LAUNCH.glob("*/*.py")} == ROOMS.keys()
    assert not list(LAUNCH.glob("*/*/**/*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_one_way(room: str) -> None:
    for path in (LAUNCH / room).glob("*.py"):
        known = imported(path) & {PROGRAM, *ROOMS}
        assert known <= {room, *ROOMS[room]}, f"{path} imports {sorted(known - {room, *ROOMS[room]})}"


def test_the_trainer_knows_its_own_room() -> None:
    assert imported(LAUNCH / f"{PROGRAM}.py") & ROOMS.keys() == {"common", "train"}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_its_folder_from_wherever_it_is_called(command: str, tmp_path: Path) -> None:
    called = [sys.executable, str(LAUNCH / command), "--help"]
    said = subprocess.run(called, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.startswith(f"usage: {command} ")


def test_no_two_modules_have_one_name() -> None:
    names = [path.stem for path in LAUNCH.glob("*/*.py") if not path.stem.startswith("__")]
    assert sorted(names) == sorted(set(names)) and not set(names) & {PROGRAM, *ROOMS}
