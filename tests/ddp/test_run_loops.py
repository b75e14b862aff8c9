"""`python -m hvd_dyncomp run` under torchrun, with loops that DDP runs and in which ranks do not do the same."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from common.launcher import run, torchrun

SECONDS = 300
HERE = Path(__file__).parent
# Each trains one model for four steps, of which the first one is DDP's own.
LOOPS = (
    "looks",
    "looks_in_training_mode",
    "trains_in_eval_mode",
    "is_late",
    "accumulates",
    "uses_other_parts",
    "checkpoints",
    "makes_groups",
)
OTHERS = {"trains_two": [3, 3], "checkpoints_with_static_graph": [2]}


def output_of(folder: Path, *loops: str) -> str:
    """What the program wrote, which has ended with status 0."""
    shutil.copy(HERE / "loops.py", folder)  # here, the package's sources would come first on the path
    line = [*torchrun("--standalone", "--nproc-per-node=2"), sys.executable, "-m", "hvd_dyncomp", "run"]
    try:
        done: subprocess.CompletedProcess = run([*line, "loops.py", *loops], timeout=SECONDS, cwd=folder)
    except subprocess.TimeoutExpired as expired:
        raise AssertionError(f"no end after {SECONDS} s\n{expired.output}") from None
    assert done.returncode == 0, done.stdout
    assert re.findall(r"^(\w+): (True|False)$", done.stdout, flags=re.MULTILINE) == [(name, "True") for name in loops]
    return done.stdout


@pytest.mark.thorough
@pytest.mark.timeout(SECONDS + 30)
def test_every_model_is_compressed_after_its_first_step_and_no_rank_waits_alone(tmp_path):
    output = output_of(tmp_path, *LOOPS, *OTHERS)
    steps = re.findall(r"^hvd_dyncomp: (\d+) steps at 4 bits: ", output, flags=re.MULTILINE)
    assert [int(each) for each in steps] == [*[3] * len(LOOPS), *sum(OTHERS.values(), [])], output
    assert "left as it is" not in output


@pytest.mark.thorough
@pytest.mark.timeout(SECONDS + 30)
def test_a_model_that_a_rank_has_no_batch_for_is_left_as_it_is(tmp_path):
    output = output_of(tmp_path, "has_no_batch")
    assert len(re.findall(r"^hvd_dyncomp: .*is left as it is: .*join", output, flags=re.MULTILINE)) == 1, output
