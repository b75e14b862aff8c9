"""The examples for Horovod, of docs/horovod.md and ignite, run as they stand there; all ranks have the same model."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from common.launcher import horovodrun
from recipes import EXAMPLES, check_reports, need, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

PAGE = EXAMPLES.parent / "horovod.md"

# What the page takes for granted. `clips` are the norms that are left by each clipping.
GIVEN = """
import json
import horovod.torch as hvd
import torch
import train
from hvd_dyncomp import DynamicQuantizer

hvd.init()
torch.manual_seed(0)
clips = []
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_

def clipped(parameters, limit):
    parameters = list(parameters)
    clip_grad_norm_(parameters, limit)
    clips.append(float(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])))

torch.nn.utils.clip_grad_norm_ = clipped

rows, classes = train.made_up_data(2048, seed=1 + hvd.rank())
batches = 4 * list(zip(rows.split(64), classes.split(64)))
model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

def validate(model):
    rows, classes = train.made_up_data(512, seed=1001 + hvd.rank())
    with torch.no_grad():
        return float((model(rows).argmax(1) == classes).float().mean())

def report(model, quantizer):
    controller = quantizer.controller
    if not controller.history:
        controller.step({"val_accuracy": validate(model)})
    print(json.dumps(train.report(model, quantizer) | {"clips": clips}), flush=True)
"""
REPORT = "report(model, optimizer._compression)\n"
# Of a reader who follows the section on torch.compile.
COMPRESSED = """
optimizer = torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression=DynamicQuantizer(4)
)
"""
LOOP = """
for inputs, classes in batches:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), classes).backward()
    optimizer.step()
"""


def program(heading: str, folder: Path, before: str = "", after: str = "") -> list[str]:
    """Path of a program with the section's only example for Horovod in it."""
    page = PAGE.read_text(encoding="utf-8")
    [section] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", page, flags=re.DOTALL | re.MULTILINE)
    [example] = re.findall(r"^```python\n(# Horovod\n.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    path = folder / "program.py"
    path.write_text("\n".join([GIVEN, before, example, after, REPORT]), encoding="utf-8")
    return [str(path)]


def reports(said: str) -> list[dict]:
    """What ranks 0 and 1 said, who hold the same model."""
    found = sorted((json.loads(line) for line in re.findall(r'\{"rank": .*?\}', said)), key=lambda said: said["rank"])
    assert [report["rank"] for report in found] == [0, 1] and {report["size"] for report in found} == {2}
    for key in ("parameters", "steps", "clips"):
        assert found[0][key] == found[1][key], f"ranks have different {key}"
    assert all(report["accuracy"] > 0.8 for report in found)
    return found


def bytes_sent(report: dict) -> int:
    """Percent of float32."""
    return int(report["sent"].split("%")[0])


@pytest.mark.parametrize("options", [(), ("--gloo",)], ids=["mpi", "gloo"])
def test_ignite(options):
    need("ignite")
    check_reports(said_by(horovodrun(2, ["ignite_train.py"], *options), 120), ranks=2)


def test_ignite_starts_the_ranks(tmp_path):
    need("ignite")
    here, there = 'idist.Parallel(backend="horovod")', 'idist.Parallel(backend="horovod", nproc_per_node=2)'
    text = (EXAMPLES / "ignite_train.py").read_text(encoding="utf-8")
    assert text.count(here) == 1 and there in text
    path = tmp_path / "program.py"
    path.write_text(text.replace(here, there), encoding="utf-8")
    check_reports(said_by([sys.executable, str(path)], 120, PYTHONPATH=str(EXAMPLES)), ranks=2)


def test_clipping_and_accumulation(tmp_path):
    said = said_by(horovodrun(2, program("Clipping and accumulation", tmp_path)), 120, PYTHONPATH=str(EXAMPLES))
    for report in reports(said):
        assert bytes_sent(report) < 30
        assert report["steps"] == 4 * 32 / 2 == len(report["clips"])
        assert 0.1 < max(report["clips"]) < 0.5001


def test_torch_compile(tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    said = said_by(horovodrun(2, program("torch.compile", tmp_path, COMPRESSED, LOOP)), 300, PYTHONPATH=str(EXAMPLES))
    assert all(bytes_sent(report) < 30 and report["steps"] == 4 * 32 for report in reports(said))
