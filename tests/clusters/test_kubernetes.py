"""The jobs and their image hold together. Where there is podman the image is built and run; Kubernetes there is none.

HVD_DYNCOMP_IMAGE_OPTIONS has what the build needs besides, "--build-arg PIP_EXTRA_INDEX_URL=..." for instance. Image
and layers stay in podman's store, so that the next build takes seconds.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pods import run_job, why_not
from recipes import EXAMPLES, check_reports, need, said_by

pytestmark = pytest.mark.clusters

FOLDER = EXAMPLES / "kubernetes"
ROOT = EXAMPLES.parents[1]
JOB = yaml.safe_load((FOLDER / "mpijob.yaml").read_text())
DDP_JOB = yaml.safe_load((FOLDER / "pytorchjob.yaml").read_text())
PODS = DDP_JOB["spec"]["pytorchReplicaSpecs"]

# Fields of the operator's v2beta1 API, from its types.go (v0.4 to v0.6).
SPEC = {
    "slotsPerWorker",
    "runPolicy",
    "mpiReplicaSpecs",
    "sshAuthMountPath",
    "launcherCreationPolicy",
    "mpiImplementation",
}
RUN_POLICY = {
    "cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy", "suspend",
}  # fmt: skip


def replicas(which):
    return JOB["spec"]["mpiReplicaSpecs"][which]


def container(which):
    (only,) = replicas(which)["template"]["spec"]["containers"]
    return only


def test_fields_are_those_of_the_api():
    assert (JOB["apiVersion"], JOB["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    assert set(JOB) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(JOB["spec"]) <= SPEC
    assert set(JOB["spec"]["runPolicy"]) <= RUN_POLICY
    assert JOB["spec"]["runPolicy"]["cleanPodPolicy"] in ("All", "Running", "None")
    assert set(JOB["spec"]["mpiReplicaSpecs"]) == {"Launcher", "Worker"}
    for which in ("Launcher", "Worker"):
        assert set(replicas(which)) == {"replicas", "restartPolicy", "template"}
        assert replicas(which)["restartPolicy"] in ("Never", "OnFailure")
    assert replicas("Launcher")["replicas"] == 1


@pytest.mark.parametrize("which", ["Launcher", "Worker"])
def test_pod_templates_are_kubernetes_own(which):
    need("kubernetes_validate")
    import kubernetes_validate

    template = {"apiVersion": "v1", "kind": "PodTemplate", "template": replicas(which)["template"]}
    kubernetes_validate.validate(template, kubernetes_validate.latest_version(), strict=True)


def test_as_many_ranks_as_places():
    command = container("Launcher")["command"]
    ranks = int(command[command.index("-np") + 1])
    assert ranks == JOB["spec"]["slotsPerWorker"] * replicas("Worker")["replicas"]
    cores = int(container("Worker")["resources"]["limits"]["cpu"])
    assert cores >= JOB["spec"]["slotsPerWorker"]


def test_environment_is_what_the_benchmarks_set():
    from hvd_dyncomp.transport.mpi_settings import DEFAULTS

    environment = {each["name"]: each["value"] for each in container("Launcher")["env"]}
    assert DEFAULTS.items() <= environment.items()
    command = container("Launcher")["command"]
    for name in set(environment) - set(DEFAULTS):
        assert command[command.index(name) - 1] == "-x"


def test_the_pytorchjob_has_fields_of_the_api():
    assert (DDP_JOB["apiVersion"], DDP_JOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(DDP_JOB) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(DDP_JOB["spec"]) <= {"elasticPolicy", "nprocPerNode", "pytorchReplicaSpecs", "runPolicy"}
    assert set(DDP_JOB["spec"]["runPolicy"]) <= RUN_POLICY
    assert set(PODS) == {"Master", "Worker"} and PODS["Master"]["replicas"] == 1
    for pods in PODS.values():
        assert set(pods) == {"replicas", "restartPolicy", "template"} and pods["restartPolicy"] == "Never"
        [only] = pods["template"]["spec"]["containers"]
        assert only["name"] == "pytorch" and only["image"] == container("Launcher")["image"]


@pytest.mark.parametrize("which", ["Master", "Worker"])
def test_pod_templates_of_the_pytorchjob_are_kubernetes_own(which):
    need("kubernetes_validate")
    import kubernetes_validate

    template = {"apiVersion": "v1", "kind": "PodTemplate", "template": PODS[which]["template"]}
    kubernetes_validate.validate(template, kubernetes_validate.latest_version(), strict=True)


def test_the_pods_of_the_pytorchjob_train_together():
    """As processes of this machine, with the variables that the operator sets."""
    pods = sum(each["replicas"] for each in PODS.values())
    cores = int(PODS["Master"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
    shell, option, line = PODS["Master"]["template"]["spec"]["containers"][0]["command"]
    found = re.search(r"--nnodes (\d+) --nproc-per-node (\d+) ", line)
    assert found and int(found[1]) == pods and int(found[2]) <= cores
    line = line.replace("/job/", f"{EXAMPLES}/")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    operators = {"MASTER_ADDR": "localhost", "MASTER_PORT": "23456", "WORLD_SIZE": str(pods), "PATH": path}
    started = [
        subprocess.Popen(
            [shell, option, line],
            env={**os.environ, **operators, "RANK": str(pod), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for pod in range(pods)
    ]
    said = [each.communicate(timeout=200)[0] for each in started]
    assert [each.returncode for each in started] == [0] * pods, said
    assert "% saved" in said[0] and "epoch 4: validation loss" in said[0]


def test_image_is_built_from_what_there_is():
    dockerfile = (FOLDER / "Dockerfile").read_text()
    # With "--from" it is from another stage.
    copied = [name for line in re.findall(r"^COPY ([^-].*)$", dockerfile, re.M) for name in line.split()[:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    # What a build of the package reads.
    assert {"setup.py", "setup.cfg", "pyproject.toml", "README.md", "hvd_dyncomp", "tools"} <= set(copied)
    programs = [name for name in copied if name.startswith("docs/examples/")]
    assert {path.name for path in map(Path, programs)} == {"train.py", "train_ddp.py"}
    for path in container("Launcher")["command"][-2:]:
        folder = re.findall(r"^WORKDIR (.*)$", dockerfile, re.M)
        assert any(path.startswith(f"{each}/") for each in folder), path
    assert container("Launcher")["image"] == container("Worker")["image"]


@pytest.fixture(scope="module")
def image():
    reason = why_not()
    if reason:
        pytest.skip(f"an image: {reason}")
    name = "localhost/hvd-dyncomp-test"
    options = shlex.split(os.environ.get("HVD_DYNCOMP_IMAGE_OPTIONS", ""))
    command = ["podman", "build", "--layers", "-f", str(FOLDER / "Dockerfile"), "-t", name, *options, str(ROOT)]
    subprocess.run(command, check=True)
    return name


@pytest.mark.timeout(3600)
def test_image_trains(image):
    command = ["podman", "run", "--rm", "--env", "OMP_NUM_THREADS=1", image]
    check_reports(said_by([*command, "horovodrun", "-np", "2", "python", "train.py"], 300), ranks=2)


@pytest.mark.timeout(3600)
def test_job_runs_in_pods(image, tmp_path):
    check_reports(run_job(JOB, image, tmp_path, 300), ranks=4)
