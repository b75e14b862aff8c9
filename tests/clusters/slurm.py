"""A Slurm of two nodes, which are network namespaces of this machine: each with a slurmd and an ssh server."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from common.launcher import end
from netlab.hosts import Lab, hosts, why_not

NODES = ("node1", "node2")
# Debian's packages munge, slurmctld, slurmd, slurm-client, openssh-server.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "sshd", "ssh-keygen")

# Processes are told apart by namespaces here, so that neither control groups nor CPU binding are wanted.
CONFIGURATION = """
ClusterName=two_nodes
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
TmpFS={folder}/tmp-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
NodeName=node[1-2] CPUs=4 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""
# Named, or slurmd would look for its version where a network namespace has nothing mounted. It is not used.
CONTROL_GROUPS = "CgroupPlugin=cgroup/v1\n"
SSH_SERVER = """
HostKey {folder}/ssh_key
AuthorizedKeysFile {folder}/ssh_key.pub
StrictModes no
PidFile none
"""
SSH_CLIENT = """
IdentityFile {folder}/ssh_key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""
# What only these nodes are to see lies over the machine's files, in a mount namespace of each process.
_ENTER = """
hostname "$0" && mount --bind "$1/hosts" /etc/hosts && mount --bind "$1/ssh_config" /etc/ssh/ssh_config || exit
shift
exec "$@"
"""


def program(name: str) -> str | None:
    """Where a daemon or command is; daemons may lie outside an ordinary user's PATH."""
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")


def missing() -> str:
    """Why there can be no Slurm here; "" if there can."""
    absent = [name for name in PROGRAMS if program(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else why_not()


class Slurm:
    """A Slurm that runs.

    Attributes:
        environment: what its commands need.
    """

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf")}

    def on_node(self, number: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a node, from 0."""
        path = program(command[0])
        assert path is not None
        enter = ["unshare", "--mount", "--uts", "sh", "-c", _ENTER, NODES[number], str(self._folder)]
        return self._lab.on_host(number, [*enter, path, *command[1:]])

    def says(self, *command: str) -> str:
        """What one of Slurm's commands says; "" if it fails."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(self.on_node(0, command), capture_output=True, text=True, env=environment, check=False)
        return done.stdout if done.returncode == 0 else ""

    def write_files(self) -> None:
        """Everything that the daemons read."""
        (self._folder / "hosts").write_text(
            "127.0.0.1 localhost\n" + "".join(f"{self._lab.addresses[n]} {name}\n" for n, name in enumerate(NODES))
        )
        files = {"slurm.conf": CONFIGURATION, "cgroup.conf": CONTROL_GROUPS}
        for name, content in (files | {"sshd_config": SSH_SERVER, "ssh_config": SSH_CLIENT}).items():
            (self._folder / name).write_text(content.format(folder=self._folder))
        (self._folder / "munge.key").write_bytes(os.urandom(128))
        (self._folder / "munge.key").chmod(0o600)
        key = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._folder / "ssh_key")]
        subprocess.run(key, check=True)
        for name in NODES:
            (self._folder / f"tmp-{name}").mkdir()  # Slurm's PMIx has a folder for each step there
        Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's sshd wants to be rooted

    def daemons(self) -> Iterator[tuple[int, list[str]]]:
        """Nodes and command lines, in the order in which they are to be started."""
        folder = self._folder
        munge = ["munged", "--foreground", "--force", f"--key-file={folder}/munge.key"]
        munge += [f"--socket={folder}/munge.socket"]
        yield 0, [*munge, *(f"--{what}-file={folder}/munged.{what}" for what in ("log", "pid", "seed"))]
        yield 0, ["slurmctld", "-D"]
        for number in range(len(NODES)):
            yield number, ["slurmd", "-D"]
            yield number, ["sshd", "-D", "-e", "-f", f"{folder}/sshd_config"]

    @contextmanager
    def daemon(self, number: int, command: list[str]) -> Iterator[None]:
        """One daemon, until the end."""
        with (self._folder / f"{command[0]}-{number}.out").open("w") as output:
            line, environment = self.on_node(number, command), {**os.environ, **self.environment}
            process = subprocess.Popen(line, stdout=output, stderr=output, env=environment)
            try:
                yield
            finally:
                end(process.pid)
                process.wait()

    def run(self, script: Path, *options: str, seconds: float, **environment: str) -> str:
        """Submits a batch script from its folder and returns what its job has said, once it has succeeded.

        Raises:
            RuntimeError: it has not, or not in time; with what it has said.
        """
        output, until = self._folder / f"{time.monotonic_ns()}.out", time.monotonic() + seconds
        command = ["sbatch", "--parsable", *options, f"--output={output}", str(script)]
        environment = {**os.environ, **self.environment, **environment}
        job = subprocess.run(
            self.on_node(0, command), env=environment, cwd=script.parent, check=True, capture_output=True, text=True
        ).stdout.strip()
        state = "PENDING"
        while state in ("PENDING", "RUNNING", "COMPLETING"):  # "sbatch --wait" sleeps for half a minute in between
            time.sleep(0.5)
            state = self.says("squeue", "--noheader", "--states=all", "--format=%T", "--jobs", job).strip()
            state = "TIMEOUT" if time.monotonic() > until else state
        said = output.read_text() if output.exists() else "nothing"
        if state != "COMPLETED":
            raise RuntimeError(f"job {job}: {state}; it said\n{said}")
        return said

    def wait(self, seconds: float = 30) -> None:
        """Returns when all nodes are idle.

        Raises:
            RuntimeError: they are not, with what the daemons have said.
        """
        until = time.monotonic() + seconds
        while self.says("sinfo", "--noheader", "--format=%D %T").split() != [str(len(NODES)), "idle"]:
            if time.monotonic() > until:
                logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.out"))]
                raise RuntimeError("Slurm does not start\n" + "\n".join(logs))
            time.sleep(0.5)


@contextmanager
def two_nodes(folder: Path) -> Iterator[Slurm]:
    """Brings a Slurm up whose files are in a folder; takes it down at the end, with all that it runs."""
    with ExitStack() as stack:
        slurm = Slurm(stack.enter_context(hosts(len(NODES))), folder)
        slurm.write_files()
        for number, command in slurm.daemons():
            stack.enter_context(slurm.daemon(number, command))
        slurm.wait()
        yield slurm
