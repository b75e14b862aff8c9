"""Runs on disk, a JSON line each."""

from __future__ import annotations

import json
from pathlib import Path

from common.errors import RunError

Key = tuple[str, str, int]  # task, method, seed


def read(path: Path) -> dict[Key, dict]:
    """The runs that are there; none, if the file is not.

    Raises:
        RunError: a line is no run. (One without an end does not count: whoever wrote it was killed.)
    """
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")
    found: dict[Key, dict] = {}
    for number, line in enumerate(lines[:-1], 1):
        try:
            run = json.loads(line)
            found[run["task"], run["contender"], run["seed"]] = run
        except (ValueError, TypeError, KeyError):
            raise RunError(f"{path}, line {number}: not a run") from None
    return found


def repair(path: Path) -> None:
    """Cut off half a line at the end, which a killed process has left. Not while others write."""
    if path.exists():
        raw = path.read_bytes()
        with path.open("r+b") as file:
            file.truncate(raw.rfind(b"\n") + 1)


def append(path: Path, run: dict) -> None:
    """Add a run in one piece: several processes may write."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(run).encode() + b"\n")
