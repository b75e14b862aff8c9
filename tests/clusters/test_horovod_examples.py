"""Horovod's own examples take the diffs of docs/examples, and run.

The source distribution of Horovod has no examples; its repository has. HOROVOD_EXAMPLES names that folder of a clone.
"""

import gzip
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from common.launcher import horovodrun
from recipes import EXAMPLES, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

DIFFS = sorted(EXAMPLES.glob("horovod_*.diff"))
FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture
def patched(tmp_path):
    """A copy of the examples with all diffs applied."""
    original = os.environ.get("HOROVOD_EXAMPLES")
    if original is None:
        pytest.skip("HOROVOD_EXAMPLES does not name the folder 'examples' of a clone of Horovod")
    folder = tmp_path / "examples"
    shutil.copytree(original, folder)
    for diff in DIFFS:
        command = ["patch", "-p1", "--fuzz=0", "--directory", str(tmp_path), "--input", str(diff)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture
def data(tmp_path):
    """Fashion-MNIST's first images where MNIST is looked for: ranks that find it download nothing."""
    if not FASHION.is_dir():
        pytest.skip("Debian's package dataset-fashion-mnist is not installed")
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name, count in (("train", 6000), ("t10k", 1000)):
        for kind, header, size in (("images-idx3", 16, 784), ("labels-idx1", 8, 1)):
            with gzip.open(FASHION / f"{name}-{kind}-ubyte.gz") as file:
                content = bytearray(file.read(header + count * size))
            content[4:8] = count.to_bytes(4, "big")
            (raw / f"{name}-{kind}-ubyte").write_bytes(content)
    return tmp_path / "data"


def test_diffs_apply(patched):
    assert len(DIFFS) == 3
    for diff in DIFFS:
        name = re.search(r"^\+\+\+ b/examples/(.*)$", diff.read_text(), re.M)[1]
        program = (patched / name).read_text()
        compile(program, name, "exec")
        assert program.count("DynamicQuantizer(") == 1


def test_mnist_learns(patched, data):
    program = [str(patched / "pytorch" / "pytorch_mnist.py"), "--no-cuda", "--epochs", "2", "--data-dir", str(data)]
    said = said_by(horovodrun(2, program), 300, cwd=data)
    assert "Accuracy: " in said
    assert float(said.rpartition("Accuracy: ")[2].split("%")[0]) > 40


def test_elastic_mnist_learns(patched, data):
    folder = patched / "elastic" / "pytorch"
    program = [str(folder / "pytorch_mnist_elastic.py"), "--no-cuda", "--epochs", "2", "--data-dir", str(data)]
    options = ["--min-np", "2", "--max-np", "2", "--gloo", "--network-interfaces", "lo"]
    script = folder / "discover.sh"
    script.write_text("#!/bin/sh\necho localhost:2\n")
    script.chmod(0o755)
    said = said_by(horovodrun(2, program, *options, "--host-discovery-script", str(script)), 300, cwd=data)
    assert float(said.rpartition("Accuracy: ")[2].split("%")[0]) > 40
