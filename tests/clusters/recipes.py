"""Runs the programs of docs/examples, under a time limit, and reads what their ranks report."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from common.launcher import run

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMPI_MCA_mpi_yield_when_idle": "1", "PYTHONDONTWRITEBYTECODE": "1"}
if os.geteuid() == 0:
    ENVIRONMENT |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
# Programs that are named "python" in a recipe are to be this interpreter's.
ENVIRONMENT["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])


def need(*modules: str) -> None:
    """Skips where a module is missing; says which versions there are, for the table in docs/frameworks.md."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
        for distribution in importlib.metadata.packages_distributions()[module]:  # ignite is of pytorch-ignite
            print(distribution, importlib.metadata.version(distribution))


def said_by(command: list[str], seconds: float, cwd: Path = EXAMPLES, **environment: str) -> str:
    """What a program that must succeed says; a deadlock is a failure when the time is over."""
    done = run(command, timeout=seconds, cwd=cwd, env={**os.environ, **ENVIRONMENT, **environment})
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout


def check_reports(said: str, ranks: int, best: float = 16) -> None:
    """Every rank has reported once, all hold the same model, which has learned while the level climbed.

    Args:
        said: output with a line of JSON per rank, whatever the launcher puts before it.
        ranks: how many there must be.
        best: the level after the last epoch.
    """
    reports = [json.loads(line) for line in re.findall(r'\{"rank": .*?\}', said)]
    assert sorted(report["rank"] for report in reports) == list(range(ranks))
    assert {report["size"] for report in reports} == {ranks}
    assert len({report["parameters"] for report in reports}) == 1, "ranks hold different models"
    for report in reports:
        assert report["levels"] == sorted(report["levels"])
        assert report["levels"][0] < best == report["levels"][-1]
        assert report["accuracy"] > 0.8
        assert 12 < int(report["sent"].split("%")[0]) < 60  # between 4 and 16 bits of 32, and all that is small
