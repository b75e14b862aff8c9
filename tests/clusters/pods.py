"""The pods of an MPIJob as the MPI operator makes them: podman's containers, each in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common.launcher import run
from netlab.hosts import hosts
from netlab.hosts import why_not as why_no_hosts
from netlab.namespaces import prefix_of

BASE = "docker.io/library/debian:bookworm-slim"
# What the operator adds to a launcher's environment.
_OPERATORS = {
    "K_MPI_JOB_ROLE": "launcher",
    "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
    "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
    "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
}


def why_not() -> str:
    """Why there can be no pods here, nor an image for them; "" if there can."""
    absent = [name for name in ("podman", "ssh-keygen") if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    if subprocess.run(["podman", "image", "exists", BASE]).returncode != 0:
        return f"podman has no {BASE}; 'podman pull {BASE}' gets it"
    return why_no_hosts()


class Pods:
    """A job's pods: the launcher is the first, the workers are the others.

    Args:
        job: the MPIJob.
        addresses: of the pods.
        folder: where the files go that the operator mounts.
    """

    def __init__(self, job: dict[str, Any], addresses: list[str], folder: Path) -> None:
        self._spec, self._folder = job["spec"], folder
        name = job["metadata"]["name"]
        self._names = [f"{name}-launcher", *(f"{name}-worker-{number}" for number in range(len(addresses) - 1))]
        services = [f"{pod}.{name}.default.svc" for pod in self._names]
        self._write_files(dict(zip(services, addresses, strict=True)))

    def _write_files(self, addresses: dict[str, str]) -> None:
        for name in ("mpi", "ssh"):
            (self._folder / name).mkdir()
        places = [f"{service} slots={self._spec['slotsPerWorker']}\n" for service in list(addresses)[1:]]
        (self._folder / "mpi" / "hostfile").write_text("".join(places))
        known = [f"{address} {service} {service.split('.')[0]}\n" for service, address in addresses.items()]
        (self._folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(known))
        key = self._folder / "ssh" / "id_ecdsa"
        subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-N", "", "-f", str(key)], check=True)
        shutil.copy(f"{key}.pub", key.with_name("authorized_keys"))

    def command(self, number: int, image: str) -> list[str]:
        """The command line that starts a pod, from 0, and ends with it."""
        template = self._spec["mpiReplicaSpecs"]["Worker" if number else "Launcher"]["template"]
        (container,) = template["spec"]["containers"]
        environment = {each["name"]: each["value"] for each in container.get("env", ())}
        environment |= {} if number else _OPERATORS
        home = Path("~root").expanduser()  # the image's user, to whose home the operator brings the key
        mounted = {"ssh": f"{home}/.ssh", "mpi": "/etc/mpi", "hosts": "/etc/hosts"}
        return [
            *("podman", "run", "--rm", "--name", self._names[number], "--hostname", self._names[number]),
            *("--network", f"ns:/run/netns/{prefix_of(os.getpid())}{number + 1}", "--no-hosts", "--shm-size", "1g"),
            *(f"--volume={self._folder / name}:{path}:ro" for name, path in mounted.items()),
            *(f"--env={name}={value}" for name, value in environment.items()),
            *(image, *container["command"]),
        ]

    @contextmanager
    def workers(self, image: str) -> Iterator[None]:
        """All workers, until the end."""
        processes = [subprocess.Popen(self.command(number, image)) for number in range(1, len(self._names))]
        try:
            yield
        finally:
            subprocess.run(["podman", "rm", "--force", "--ignore", "--time", "0", *self._names], capture_output=True)
            for process in processes:
                process.wait()


def run_job(job: dict[str, Any], image: str, folder: Path, seconds: float) -> str:
    """What the launcher of a job says that must succeed in so many seconds."""
    replicas = job["spec"]["mpiReplicaSpecs"]["Worker"]["replicas"]
    with hosts(replicas + 1) as lab:
        pods = Pods(job, lab.addresses, folder)
        with pods.workers(image):
            done = run(pods.command(0, image), timeout=seconds)
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout
