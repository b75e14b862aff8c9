"""The examples for Horovod of two pages run as they stand there, and leave all ranks with the same model."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from common.launcher import horovodrun
from recipes import EXAMPLES, check_reports, need, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]

PAGES = [EXAMPLES.parent / name for name in ("frameworks.md", "training.md")]
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)

# What the pages take for granted. `clips` are the norms that are left by each clipping.
GIVEN = """
import json
import train

torch.manual_seed(0)
clips = []
clip_grad_norm_ = torch.nn.utils.clip_grad_norm_

def clipped(parameters, limit):
    parameters = list(parameters)
    clip_grad_norm_(parameters, limit)
    clips.append(float(torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters])))

torch.nn.utils.clip_grad_norm_ = clipped

def make_model():
    return torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

def batches(rank):
    rows, classes = train.made_up_data(2048, seed=1 + rank)
    return list(zip(rows.split(64), classes.split(64)))

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


def section(heading: str) -> str:
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)", TEXT, flags=re.DOTALL | re.MULTILINE)
    assert found is not None, f"no page has a section {heading!r}"
    return found[1]


def fences(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def program(heading: str, folder: Path, *changes: tuple[str, str]) -> list[str]:
    """Path of the section's example, after the pages' imports; `changes`, which it names, are made in it."""
    *_, example = fences(section(heading))
    for old, new in changes:
        assert example.count(old) == 1 and new in section(heading)
        example = example.replace(old, new)
    path = folder / "program.py"
    path.write_text("\n".join([*fences(section("With Horovod")), GIVEN, example]), encoding="utf-8")
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
def test_ignite(options, tmp_path):
    need("ignite")
    command = horovodrun(2, program("Ignite", tmp_path), *options)
    check_reports(said_by(command, 120, PYTHONPATH=str(EXAMPLES)), ranks=2)


def test_ignite_starts_the_ranks(tmp_path):
    need("ignite")
    here, there = 'idist.Parallel(backend="horovod")', 'idist.Parallel(backend="horovod", nproc_per_node=2)'
    command = [sys.executable, *program("Ignite", tmp_path, (here, there))]
    check_reports(said_by(command, 120, PYTHONPATH=str(EXAMPLES)), ranks=2)


def test_lightning_as_in_the_example():
    """test_programs.py runs it."""
    (example,) = fences(section("Lightning 2"))
    assert example in (EXAMPLES / "lightning_train.py").read_text(encoding="utf-8")


def test_clipping_and_accumulation(tmp_path):
    said = said_by(horovodrun(2, program("Clipping and accumulation", tmp_path)), 120, PYTHONPATH=str(EXAMPLES))
    for report in reports(said):
        assert bytes_sent(report) < 30
        assert report["steps"] == 4 * 32 / 2 == len(report["clips"])
        assert 0.1 < max(report["clips"]) < 0.5001


def test_torch_compile(tmp_path):
    if shutil.which("c++") is None:
        pytest.skip("inductor needs a C++ compiler")
    said = said_by(horovodrun(2, program("torch.compile", tmp_path)), 300, PYTHONPATH=str(EXAMPLES))
    assert all(bytes_sent(report) < 30 and report["steps"] == 4 * 32 for report in reports(said))
