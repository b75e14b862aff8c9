"""DistributedDataParallel on GPUs, without Horovod. tools/on_gpu.sh also runs the files in on_ranks/ there, over NCCL.

Skipped where there is no GPU; tools/on_gpu.sh elsewhere rehearses it with HVD_DYNCOMP_TEST_DEVICE=cpu.
"""

import json
import os
import time
from pathlib import Path

import pytest
import torch
from torchrun import run_program

from common.launcher import TRAINER

VARIABLE = "HVD_DYNCOMP_TEST_DEVICE"
RANKS = 2
SECONDS = 60

pytestmark = pytest.mark.skipif(
    VARIABLE not in os.environ and not torch.cuda.is_available(), reason="torch sees no GPU"
)


@pytest.mark.timeout(SECONDS + 30)
def test_a_killed_rank_ends_the_job():
    """Within seconds, though a GPU may wait for what will never come."""
    began = time.monotonic()
    done = run_program(RANKS, Path(__file__).with_name("dies.py"), "killed", seconds=SECONDS)
    assert done.returncode != 0 and "Signal 9 (SIGKILL)" in done.stdout, done.stdout
    assert time.monotonic() - began < 0.5 * SECONDS


@pytest.mark.timeout(SECONDS + 30)
def test_training(tmp_path):
    flags = ["--dataset", "digits", "--model", "resnet8", "--limit-train", "512", "--epochs", "4"]
    flags += ["--compression", "static", "--bits", "4", "--device", os.environ.get(VARIABLE, "cuda")]
    flags += ["--output-dir", str(tmp_path / "run")]
    done = run_program(RANKS, TRAINER, *flags, seconds=SECONDS, PYTHONPATH=str(TRAINER.parent))
    assert done.returncode == 0, done.stdout
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert last["test_accuracy"] > 0.5 and last["level"] == 4
