"""The batch scripts of docs/examples on the two nodes of a Slurm that is started for them."""

import re
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


def test_torchrun(slurm):
    """DistributedDataParallel, with half the ranks that the script has."""
    given = {"VENV": str(Path(sys.executable).parents[1]), "RANKS_PER_NODE": "2"}
    said = slurm.run(EXAMPLES / "slurm_torchrun.sbatch", "--cpus-per-task=2", seconds=200, **ENVIRONMENT, **given)
    print(said)
    assert re.search(r"^epoch 4: validation loss", said, re.MULTILINE)
    [saved] = re.findall(r"^rank 0 sent .*: (\S+)% saved$", said, re.MULTILINE)
    assert 85 < float(saved) < 88


def test_the_page_shows_lines_of_the_script():
    page = (EXAMPLES.parent / "clusters.md").read_text(encoding="utf-8")
    [shown] = re.findall(r"^```bash\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert set(shown.splitlines()) <= set((EXAMPLES / "slurm_torchrun.sbatch").read_text(encoding="utf-8").splitlines())
