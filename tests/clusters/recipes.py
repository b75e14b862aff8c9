"""Runs the programs of docs/examples, under a time limit, and reads what their ranks report.

A test skips what is not installed. Install what it names in a copy of `make setup`'s environment, because Spark and
Lightning need older versions: those of the tables of docs/frameworks.md and clusters.md, and

- for Ray "ray[default]"; for Spark Java 17, "pyspark<4" "numpy<2" petastorm;
- for Slurm root, and Debian's munge slurmctld slurmd slurm-client openssh-server iproute2;
- for Kubernetes kubernetes-validate and jsonschema; HVD_DYNCOMP_MPIJOB_CRD=FILE is the operator's
  manifests/base/kubeflow.org_mpijobs.yaml;
- for its image root, and Debian's podman openssh-client iproute2, with docker.io/library/debian:bookworm-slim in
  podman's store; HVD_DYNCOMP_IMAGE_OPTIONS has more arguments of `podman build`;
- for Horovod's examples tensorboard, HOROVOD_EXAMPLES, the folder `examples` of a clone of Horovod, and Debian's
  dataset-fashion-mnist.
"""

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
    """Skips where a module is missing; says which versions there are, for tables of frameworks.md and clusters.md."""
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


def check_reports(said: str, ranks: int) -> None:
    """Every rank has reported once, all hold the same model, which has learned with 4 bits.

    Args:
        said: output with a line of JSON per rank, whatever the launcher puts before it.
        ranks: how many there must be.
    """
    reports = [json.loads(line) for line in re.findall(r'\{"rank": .*?\}', said)]
    assert sorted(report["rank"] for report in reports) == list(range(ranks))
    assert {report["size"] for report in reports} == {ranks}
    assert len({report["parameters"] for report in reports}) == 1, "ranks hold different models"
    for report in reports:
        assert set(report["levels"]) == {4}
        assert report["accuracy"] > 0.8
        assert 12 < int(report["sent"].split("%")[0]) < 20  # 4 bits of 32, and all that is small
