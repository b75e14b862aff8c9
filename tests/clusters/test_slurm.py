"""The batch scripts of docs/examples under a Slurm of one node, which is started for them and ended again."""

import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.launcher import end
from recipes import EXAMPLES, check_reports, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
CONFIGURATION = """
ClusterName=here
SlurmctldHost={host}
SlurmUser=root
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
NodeName={host} CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """Environment of a Slurm that runs; ends what it has started."""
    search = os.environ["PATH"] + ":/usr/sbin"
    missing = [name for name in PROGRAMS if shutil.which(name, path=search) is None]
    if missing or os.geteuid() != 0:
        pytest.skip(f"a Slurm of one's own needs root and Debian's slurm-wlm and munge; missing: {missing}")
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    configuration = folder / "slurm.conf"
    host = socket.gethostname().split(".")[0]
    ports = {"controller_port": free_port(), "node_port": free_port()}
    configuration.write_text(CONFIGURATION.format(folder=folder, host=host, **ports))
    munge = [
        "--foreground",
        "--force",
        "--key-file",
        str(folder / "munge.key"),
        "--socket",
        str(folder / "munge.socket"),
    ]
    munge += [f"--{what}-file={folder / f'munged.{what}'}" for what in ("log", "pid", "seed")]
    environment = {"SLURM_CONF": str(configuration)}
    commands = [["munged", *munge], ["slurmctld", "-D", "-f", configuration], ["slurmd", "-D", "-f", configuration]]
    started = []
    try:
        for command in commands:
            with (folder / f"{command[0]}.out").open("w") as output:
                path = shutil.which(command[0], path=search)
                env = {**os.environ, **environment}
                started.append(subprocess.Popen([path, *command[1:]], stdout=output, stderr=output, env=env))
            time.sleep(1)
        for _ in range(60):
            state = subprocess.run(
                ["sinfo", "-h", "-o", "%T"],
                capture_output=True,
                text=True,
                env={**os.environ, **environment},
                check=False,
            )
            if state.stdout.strip() == "idle":
                break
            time.sleep(0.5)
        else:
            logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.out")))
            pytest.fail(f"Slurm does not start: {state.stdout}{state.stderr}\n{logs}")
        yield environment
    finally:
        for process in reversed(started):
            end(process.pid)
            process.wait()


@pytest.mark.parametrize(
    ("script", "environment"),
    [
        ("slurm_srun.sbatch", {}),
        ("slurm_horovodrun.sbatch", {}),
        ("slurm_horovodrun.sbatch", {"LAUNCHER": "horovodrun --gloo"}),
    ],
    ids=["srun", "horovodrun", "horovodrun-gloo"],
)
def test_batch_scripts(slurm, script, environment, tmp_path):
    if script == "slurm_srun.sbatch":
        kinds = said_by(["srun", "--mpi=list"], 30, **slurm)
        if "pmix" not in kinds:
            pytest.skip("this Slurm has no PMIx plug-in")
    output = tmp_path / "output"
    shape = ["--nodes=1", "--ntasks-per-node=2", "--time=3", f"--output={output}"]
    venv = str(Path(sys.executable).parents[1])
    try:
        said_by(["sbatch", "--wait", *shape, str(EXAMPLES / script)], 200, **slurm, **environment, VENV=venv)
    finally:
        print(output.read_text() if output.exists() else "no output")
    check_reports(output.read_text(), ranks=2)
