"""Horovod's own examples take the diffs of docs/examples, and run.

The source distribution of Horovod has no examples; its repository has. HOROVOD_EXAMPLES names that folder of a clone.
"""

import gzip
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from PIL import Image

from common.launcher import horovodrun
from recipes import EXAMPLES, need, said_by

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
    assert len(DIFFS) == 4
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


# What is appended to the ImageNet example: it says little by itself.
REPORT = """
    import hashlib, json
    values = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    total, steps = compression.meter.total(), compression.state_dict()["steps"]
    report = {"rank": hvd.rank(), "steps": steps, "resumed": resume_from_epoch, "lr": optimizer.param_groups[0]["lr"]}
    print(json.dumps(report | {"saved": total.saved_fraction, "model": hashlib.sha256(values).hexdigest()}), flush=True)
"""


@pytest.fixture
def images(tmp_path):
    """A folder each for training and validation, 10 and 4 made-up images a class: dark ones and light ones."""
    generator = torch.Generator().manual_seed(0)
    for part, count in (("train", 10), ("val", 4)):
        for name, mean in (("dark", 60), ("light", 140)):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for index in range(count):
                values = torch.randn(64, 64, 3, generator=generator) * 20 + mean
                Image.fromarray(values.clamp(0, 255).byte().numpy()).save(folder / f"{index}.png")
    return tmp_path


def test_imagenet_resumes(patched, images):
    """A rank's 10 images are two steps of two passes of 2 each, and one step of one pass."""
    need("torchvision", "tensorboard")
    example = patched / "pytorch" / "pytorch_imagenet_resnet50.py"
    example.write_text(example.read_text() + REPORT)
    options = "--no-cuda --train-dir train --val-dir val --batch-size 2 --val-batch-size 4 --batches-per-allreduce 2"
    for epochs in (1, 2):
        program = [str(example), *options.split(), "--epochs", str(epochs)]
        said = said_by(horovodrun(2, program), 180, cwd=images)
        first, second = (json.loads(line) for line in re.findall(r'\{"rank": .*?\}', said))
        assert {first.pop("rank"), second.pop("rank")} == {0, 1}
        assert first == second
        assert first["resumed"] == epochs - 1 and first["steps"] == 3
        assert 0.85 < first["saved"] < 0.88
        assert (images / f"checkpoint-{epochs}.pth.tar").is_file()
        assert f"Train Epoch     #{epochs}" in said and (epochs == 1 or "Train Epoch     #1" not in said)
