"""The elastic recipe on a Ray of two nodes, which are network namespaces of this machine: the second comes and goes."""

import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from common.launcher import end
from netlab.hosts import hosts, why_not
from recipes import ENVIRONMENT, EXAMPLES, need

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(600)]

# Ray's log of workers says every line, also where several say the same; and no token is written to the home folder.
RAY = {"RAY_DEDUP_LOGS": "0", "RAY_AUTH_MODE": "disabled", "HOROVOD_GLOO_TIMEOUT_SECONDS": "60"}


@contextmanager
def started(command, output):
    """A process that writes into a file, until the end."""
    with output.open("w") as file:
        environment = {**os.environ, **ENVIRONMENT, **RAY}
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=EXAMPLES, env=environment)
    try:
        yield
    finally:
        end(process.pid)
        process.wait()


def ray_node(lab, number, output, *options):
    """A Ray node of one core on one of the hosts."""
    options = [
        *options,
        f"--node-ip-address={lab.addresses[number]}",
        "--num-cpus=1",
        "--object-store-memory=100000000",
    ]
    ray = str(Path(sys.executable).with_name("ray"))
    return started(lab.on_host(number, [ray, "start", "--block", "--disable-usage-stats", *options]), output)


def wait(output, pattern, seconds):
    """Returns when a file has a line; what it has instead is in the error."""
    until = time.monotonic() + seconds
    while not re.search(pattern, said := output.read_text()):
        assert time.monotonic() < until, f"no {pattern!r} in\n{said}"
        time.sleep(0.2)


def test_a_node_comes_and_goes(tmp_path):
    need("ray")
    if why_not():
        pytest.skip(why_not())
    head_says, node_says, says = (tmp_path / name for name in ("head", "node", "job"))
    with ExitStack() as stack:
        lab = stack.enter_context(hosts(2))
        address = f"{lab.addresses[0]}:6379"
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-"))  # paths of sockets have to be short
        head = ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={folder}"]
        stack.enter_context(ray_node(lab, 0, head_says, *head))
        wait(head_says, "Ray runtime started", 100)
        # More epochs than there is time for: how long one takes, and how long Ray, differs from machine to machine.
        program = [sys.executable, "ray_elastic.py", "--interface", "eth0", "--epochs", "1000000"]
        stack.enter_context(started(lab.on_host(0, ["env", f"RAY_ADDRESS={address}", *program]), says))
        wait(says, "rank 0 of 1 from epoch 0", 150)
        with ray_node(lab, 1, node_says, f"--address={address}"):
            wait(says, "rank 1 of 2 from epoch", 150)
        wait(says, "rank 0 of 1 from epoch [1-9]", 150)
