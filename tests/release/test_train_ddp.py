"""`make train-ddp` in a new clone: a small environment is made, and two workers train in it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What it may call: no compiler, no MPI, nothing of this environment.
COMMANDS = ["bash", "sh", "env", "make", "dirname", "find", "awk", "rm", "touch"]

pytestmark = [pytest.mark.release, pytest.mark.timeout(3600)]


def bare_path(folder: Path) -> str:
    """PATH of a machine with only these commands."""
    outside = ":".join(path for path in os.environ["PATH"].split(":") if not path.startswith(str(ROOT)))
    for name in COMMANDS:
        found = shutil.which(name, path=outside)
        assert found, name
        (folder / name).write_text(f'#!/bin/sh\nexec {found} "$@"\n')
        (folder / name).chmod(0o755)
    return str(folder)


def test_it_trains(tmp_path: Path) -> None:
    clone, commands = tmp_path / "clone", tmp_path / "bin"
    commands.mkdir()
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True, timeout=120)
    command = [shutil.which("make") or "make", "train-ddp", "ARGS=--dataset digits --epochs 1 --output-dir runs/new"]
    environment = os.environ | {"PATH": bare_path(commands), "PYTHON": str(Path(sys.executable).resolve())}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, timeout=3000)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-4000:]
    assert not (clone / ".venv").exists() and "the native kernels are missing" in said
    [line] = (clone / "runs" / "new" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line)["saved_fraction"] > 0.8
