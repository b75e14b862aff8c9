"""The whole program of docs/horovod.md runs as it stands there, and the example of docs/averager.md with Horovod."""

import re
import sys
from pathlib import Path

import pytest
from launchers import LAUNCHERS, run_limited

DOCS = Path(__file__).resolve().parents[2] / "docs"


def test_the_whole_program(tmp_path):
    page = (DOCS / "horovod.md").read_text(encoding="utf-8")
    [script] = re.findall(r"^##+ A whole program\n.*?^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    program = tmp_path / "whole.py"
    program.write_text(script, encoding="utf-8")
    done = run_limited([*LAUNCHERS["horovodrun"], "-np", "2", sys.executable, "-P", str(program)], 120)
    assert done.returncode == 0, done.stdout
    line = r"epoch (\d): accuracy (0\.\d+), (\d+) kB sent, (\d+) kB without compression"
    epochs = re.findall(line, done.stdout)
    assert [int(epoch) for epoch, *_ in epochs] == [0, 1, 2, 3, 4], done.stdout
    assert float(epochs[-1][1]) > 0.85
    assert int(epochs[-1][2]) < 0.2 * int(epochs[-1][3])


@pytest.mark.thorough
def test_the_example_of_the_averager(tmp_path):
    page = (DOCS / "averager.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    [example] = [each for each in examples if "Averager(" in each]
    with_horovod = {
        "import torch.distributed as dist": "import horovod.torch as hvd",
        'dist.init_process_group("gloo")': "hvd.init()",
        "dist.get_rank()": "hvd.rank()",
        "dist.destroy_process_group()": "hvd.shutdown()",
    }
    for before, after in with_horovod.items():
        assert page.count(f"`{before}`") == page.count(f"`{after}`") == 1  # the page says so
        example = example.replace(before, after)
    program = tmp_path / "train.py"
    program.write_text(example, encoding="utf-8")
    done = run_limited([*LAUNCHERS["horovodrun"], "-np", "2", sys.executable, "-P", str(program)], 120)
    assert done.returncode == 0, done.stdout
    [share] = re.findall(r"(0\.\d+) of the bytes of float32", done.stdout)
    assert float(share) < 0.2
