"""The batch scripts of docs/examples on the two nodes of a Slurm that is started for them."""

import sys
from pathlib import Path

import pytest

from recipes import ENVIRONMENT, EXAMPLES, check_reports
from slurm import missing, two_nodes

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    reason = missing()
    if reason:
        pytest.skip(f"a Slurm of one's own: {reason}")
    with two_nodes(tmp_path_factory.mktemp("slurm")) as running:
        yield running


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        ("slurm_srun.sbatch", {}),
        ("slurm_horovodrun.sbatch", {}),
        ("slurm_horovodrun.sbatch", {"LAUNCHER": "horovodrun --gloo"}),
        ("slurm_horovodrun.sbatch", {"LAUNCHER": "mpirun"}),
    ],
    ids=["srun", "horovodrun", "horovodrun-gloo", "mpirun"],
)
def test_batch_scripts(slurm, script, environment):
    if script == "slurm_srun.sbatch" and "pmix" not in slurm.says("srun", "--mpi=list"):
        pytest.skip("this Slurm has no PMIx plug-in")
    # On as many nodes as the script says, but with half the workers.
    venv = str(Path(sys.executable).parents[1])
    said = slurm.run(EXAMPLES / script, "--ntasks-per-node=2", seconds=200, **ENVIRONMENT, **environment, VENV=venv)
    print(said)
    check_reports(said, ranks=4)
